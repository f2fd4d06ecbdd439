from typing import Literal

import pytest
from headrace.v1 import metrics_pb2 as wire

from services.aggregator.batch import BadBatch, decode
from tests.services.aggregator.making import (
    INF,
    NAN,
    Producer,
    change,
    count,
    deltas,
    event,
    observed,
    ratio,
)


def reasons(request: wire.PushDeltasRequest) -> list[str]:
    return [each.reason for each in decode(request).rejected]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run", "No Name"),
        ("producer", ""),
        ("service", "gateway"),
        ("boot_id", ""),
        ("sequence", 0),
        ("sequence", 2**63),
        ("now_s", NAN),
    ],
)
def test_a_batch_without_a_name_is_refused_whole(field: str, value: object) -> None:
    request = Producer("trainer-0").request()
    setattr(request, field, value)
    with pytest.raises(BadBatch, match=field.split("_")[0]):
        decode(request)


def test_one_bad_delta_does_not_take_the_others_along() -> None:
    request = Producer("p").request(
        [("loss", observed([1.0, 2.0])), ("grad_norm", observed([2.0]))]
    )
    change(request, "observations.n", 7, 1)
    batch = decode(request)
    assert [delta.key for delta in deltas(batch)] == ["grad_norm"]
    (rejected,) = batch.rejected
    assert (rejected.key, rejected.reason) == ("loss", "bad_value")
    assert "holds 2 values, n says 7" in rejected.detail


@pytest.mark.parametrize("value", [NAN, INF, -1.0])
def test_a_count_is_a_finite_number_of_events(value: float) -> None:
    request = Producer("p").request([("ingest/deltas", count(1))])
    change(request, "counts.sum", value)
    assert reasons(request) == ["bad_value"]


@pytest.mark.parametrize(("numerator", "denominator"), [(NAN, 1.0), (1.0, INF), (1.0, -2.0)])
def test_a_ratio_is_of_finite_sums(numerator: float, denominator: float) -> None:
    request = Producer("p").request([("kl", ratio(1, 1))])
    change(request, "ratios.numerator", numerator)
    change(request, "ratios.denominator", denominator)
    assert reasons(request) == ["bad_value"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("sum", NAN), ("min", 9.0), ("last", 7.0), ("last_s", 1001.0), ("last_s", -1e300)],
)
def test_an_observation_agrees_with_itself(field: str, value: float) -> None:
    request = Producer("p").request([("loss", observed([1.0, 2.0]))])
    change(request, f"observations.{field}", value)
    assert reasons(request) == ["bad_value"]


@pytest.mark.parametrize("field", ["min", "max", "last"])
def test_an_observation_of_values_says_which(field: Literal["min", "max", "last"]) -> None:
    request = Producer("p").request([("loss", observed([1.0]))])
    change(request, f"observations.{field}", NAN)
    assert reasons(request) == ["bad_value"]


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("observations.n", [1, 1]),
        ("observations.sum", []),
        ("key", [0, 0]),
        ("key", [1]),
        ("observations.num_buckets", [2]),
        ("observations.bucket_counts", [1]),
    ],
)
def test_columns_that_do_not_fit_are_refused_whole(column: str, values: list[float]) -> None:
    request = Producer("p").request([("loss", observed([1.0]))])
    change(request, column, *values)
    with pytest.raises(BadBatch):
        decode(request)


def test_a_histogram_holds_what_n_says() -> None:
    request = Producer("p").request([("loss", observed([1.0, 2.0]))])
    change(request, "observations.bucket_counts", 1, 2)
    assert reasons(request) == ["bad_value"]
    request = Producer("p").request([("loss", observed([1.0]))])
    change(request, "observations.num_buckets", 1)
    change(request, "observations.buckets", 0)
    change(request, "observations.bucket_counts", 1)
    assert reasons(request) == ["bad_value"]


@pytest.mark.parametrize(
    ("begin_s", "end_s"),
    [(2.0, 1.0), (1.0, 1000.5), (NAN, 1.0), (-1e17, 1.0), (-1e300, 1.0), (-INF, 1.0)],
)
def test_a_delta_ended_before_it_was_sent(begin_s: float, end_s: float) -> None:
    request = Producer("p").request([("loss", observed([1.0]))])
    change(request, "begin_s", begin_s)
    change(request, "end_s", end_s)
    assert reasons(request) == ["bad_time"]


@pytest.mark.parametrize("key", ["", "a" * 201, "new\nline"])
def test_a_key_is_a_short_printable_text(key: str) -> None:
    assert reasons(Producer("p").request([(key, count(1))])) == ["bad_key"]


def test_steps_fit_the_store() -> None:
    assert reasons(Producer("p").request([("loss", observed([1.0]))], step=2**63)) == ["bad_clock"]


def test_a_bad_event_does_not_take_the_others_along() -> None:
    good, nameless = event("0.1.1.0", "trained", step=3), event("", "trained")
    stateless = event("x", "trained")
    stateless.state = wire.GROUP_STATE_UNSPECIFIED
    batch = decode(Producer("p").request(events=[nameless, good, stateless]))
    assert [(each.group_id, each.step) for each in batch.events] == [("0.1.1.0", 3)]
    assert [each.reason for each in batch.rejected] == ["bad_event", "bad_event"]
