import math
from dataclasses import fields
from pathlib import Path

import numpy as np

from services.trainer import messages
from services.trainer.types import Row, TrainSample
from tests.services.trainer.numerics import make_sample


def test_a_row_travels_as_it_is() -> None:
    odd = make_sample([5, 6, 7], num_prompt=1, advantage=math.nan, rollout_id="gruppe-ä/1", lag=3)
    odd.logprobs[1:] = [-np.inf, np.nan]
    row = Row([make_sample([1, 2, 3, 4], num_prompt=2), odd], echo=True)
    found = messages.to_row(messages.of_row(row))
    assert found.echo
    assert len(found.samples) == 2
    for one, other in zip(found.samples, row.samples, strict=True):
        for each in fields(TrainSample):
            value, wanted = getattr(one, each.name), getattr(other, each.name)
            assert type(value) is type(wanted), each.name
            if isinstance(wanted, np.ndarray):
                assert value.dtype == wanted.dtype
            np.testing.assert_array_equal(value, wanted)


def test_a_number_of_numpy_is_one_of_python_on_the_other_side() -> None:
    sample = make_sample([1, 2, 3], num_prompt=1)
    object.__setattr__(sample, "advantage", np.float32(0.5))
    [found] = messages.to_row(messages.of_row(Row([sample]))).samples
    assert found.advantage == 0.5


def test_rows_travel_with_their_path() -> None:
    rows = np.arange(6).reshape(2, 3)
    found, path = messages.to_rows(messages.of_rows(rows, path=Path("/a/b")))
    np.testing.assert_array_equal(found, rows)
    assert path == Path("/a/b")
    assert messages.to_path(str(path).encode()) == path
