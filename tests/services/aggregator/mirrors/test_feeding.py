"""Mirrors over a real store: each step once and in order, whatever restarts."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
from structlog.testing import capture_logs

from services.aggregator.catalogue import CATALOGUE
from services.aggregator.ingest import Ingest
from services.aggregator.mirrors import feeding as feeding_module
from services.aggregator.mirrors.feeding import Feeding, keep_feeding
from services.aggregator.mirrors.tensorboard import TensorBoard
from services.aggregator.mirrors.types import Mirror, StepValues
from services.aggregator.store import Store
from tests.services.aggregator.making import NAN, NOW_S, Producer, count, event, observed, ratio
from tests.services.aggregator.mirrors.reading import scalars
from tests.waiting import until

pytestmark = pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)

SETTLE_S = 30.0

T = TypeVar("T")


class Remembering:
    """A mirror that keeps all calls in memory; it fails as often as it is told to."""

    name = "remembering"

    def __init__(self) -> None:
        self.opened: list[tuple[int, int]] = []
        self.steps: list[StepValues] = []
        self.closed = 0
        self.failures = 0

    def open(self, *, began: int, step: int) -> None:
        self.opened.append((began, step))

    def write(self, steps: Sequence[StepValues]) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the tracker is away")
        self.steps.extend(steps)

    def close(self) -> None:
        self.closed += 1


def feeding(
    store: Store,
    mirror: Mirror,
    *,
    now_s: float = NOW_S + 1e6,
    leads: Callable[[], bool] = lambda: True,
) -> Feeding:
    return Feeding(
        store,
        "demo",
        mirror,
        catalogue=CATALOGUE,
        settle_s=SETTLE_S,
        leads=leads,
        clock=lambda: now_s,
    )


def feed(fed: Feeding) -> int:
    """All that there is to write; how often there was something."""
    times = 0
    while (done := fed.step()) is not None:
        fed.keep(*done)
        times += 1
    return times


def train(ingest: Ingest, steps: Sequence[int], *, attempt: int = 1, loss: float = 0.5) -> None:
    """Steps of 10 s from NOW_S on, each in a bucket of its own, of two replicas of a generator."""
    trainer = Producer("trainer-0", boot_id=f"trainer-{attempt}-{steps[0]}")
    generators = [
        Producer(f"generator-{n}", service="generator", boot_id=f"{attempt}-{steps[0]}")
        for n in (0, 1)
    ]
    for step in steps:
        # In the middle of a bucket.
        now_s = NOW_S + 10.0 * step + 5.0 + 10_000 * (attempt - 1)
        trainer.send(
            ingest,
            [
                ("perf/step_s", observed([10.0])),
                ("batch/groups_per_step", observed([8.0])),
                ("loss", observed([loss])),
                ("grad_norm", observed([NAN])),
            ],
            step=step,
            attempt=attempt,
            now_s=now_s,
        )
        for number, generator in enumerate(generators):
            generator.send(
                ingest,
                [
                    ("rollout/generated_tok_s", count(500.0)),
                    ("rollout/slots_busy_frac", ratio(number, 4.0)),
                ],
                step=step,
                attempt=attempt,
                now_s=now_s,
            )


async def at_once(work: Callable[[], T]) -> T:
    """The writer, where nobody else writes."""
    return work()


def test_each_step_has_the_reduced_values(store: Store, ingest: Ingest) -> None:
    train(ingest, range(3))
    mirror = Remembering()
    assert feed(feeding(store, mirror)) == 1
    assert [each.step for each in mirror.steps] == [0, 1, 2]
    first = mirror.steps[0]
    # What the aggregator records of itself apart.
    values = {key: each for key, each in first.values.items() if not key.startswith("ingest/")}
    assert values == {
        "perf/step_s": 10.0,
        "batch/groups_per_step": 8.0,
        "loss": 0.5,
        "rollout/generated_tok_s": pytest.approx(100.0),  # of both replicas, a second
        "rollout/slots_busy_frac": pytest.approx(1 / 8),
        # What is NaN is absent.
    }
    assert first.at_s == pytest.approx(NOW_S + 10.0, abs=10.0)


def test_a_step_waits_until_it_has_settled(store: Store, ingest: Ingest) -> None:
    train(ingest, range(5))  # the last one's bucket ends 50 s after NOW_S
    mirror = Remembering()
    feed(feeding(store, mirror, now_s=NOW_S + 30.0 + SETTLE_S))
    assert [each.step for each in mirror.steps] == [0, 1, 2]
    feed(feeding(store, mirror, now_s=NOW_S + 30.0 + SETTLE_S))
    assert len(mirror.steps) == 3
    feed(feeding(store, mirror, now_s=NOW_S + 50.0 + SETTLE_S))
    assert [each.step for each in mirror.steps] == [0, 1, 2, 3, 4]


def test_a_run_that_is_over_needs_no_settling(store: Store, ingest: Ingest) -> None:
    train(ingest, range(3))
    now_s = NOW_S + 25.0
    mirror = Remembering()
    assert feed(feeding(store, mirror, now_s=now_s)) == 0
    Producer("trainer-0", boot_id="groups").send(
        ingest, events=[event("0.0.1.1", "trained")], step=2, now_s=now_s
    )
    assert feed(feeding(store, mirror, now_s=now_s)) == 1
    assert [each.step for each in mirror.steps] == [0, 1, 2]


def test_many_steps_come_in_order_and_in_pieces(
    store: Store, ingest: Ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeding_module, "AT_ONCE", 7)
    train(ingest, range(20))
    mirror = Remembering()
    assert feed(feeding(store, mirror)) == 3
    assert [each.step for each in mirror.steps] == list(range(20))
    assert mirror.opened == [(1, 0)]


def test_after_a_restart_it_goes_on_where_it_was(
    database: str, store: Store, ingest: Ingest
) -> None:
    train(ingest, range(3))
    mirror = Remembering()
    feed(feeding(store, mirror))
    train(ingest, range(3, 5))
    again = Store.open(database)
    try:
        feed(feeding(again, mirror))
    finally:
        again.close()
    assert [each.step for each in mirror.steps] == [0, 1, 2, 3, 4]
    assert mirror.opened == [(1, 0), (1, 3)]


def test_what_was_written_and_not_noted_is_written_again_from_there(
    store: Store, ingest: Ingest
) -> None:
    train(ingest, range(3))
    mirror = Remembering()
    fed = feeding(store, mirror)
    assert fed.step() is not None  # written, and never noted
    assert feed(feeding(store, mirror)) == 1
    assert mirror.opened == [(1, 0), (1, 0)]


def test_steps_that_are_made_again_begin_another_run(store: Store, ingest: Ingest) -> None:
    train(ingest, range(5), loss=0.5)
    mirror = Remembering()
    fed = feeding(store, mirror)
    feed(fed)
    train(ingest, range(3, 6), attempt=2, loss=0.25)
    feed(fed)
    assert [(each.step, each.values["loss"]) for each in mirror.steps[5:]] == [
        *((3, 0.25), (4, 0.25), (5, 0.25)),
    ]
    assert mirror.opened == [(1, 0), (2, 3)]
    train(ingest, range(6, 8), attempt=3)  # goes on, and back to nothing
    feed(fed)
    assert [each.step for each in mirror.steps[8:]] == [6, 7]
    assert mirror.opened == [(1, 0), (2, 3)]


def test_event_files_hold_each_step_once_whatever_restarts(
    store: Store, ingest: Ingest, tmp_path: Path
) -> None:
    folder = tmp_path / "tensorboard"
    train(ingest, range(5), loss=0.5)
    lost = feeding(store, TensorBoard(folder))
    assert lost.step() is not None  # the aggregator dies between the file and the note
    lost.close()
    fed = feeding(store, TensorBoard(folder))
    feed(fed)
    train(ingest, range(3, 6), attempt=2, loss=0.25)
    feed(fed)
    fed.close()
    found = scalars(folder)
    assert found["loss"] == {0: 0.5, 1: 0.5, 2: 0.5, 3: 0.25, 4: 0.25, 5: 0.25}
    assert found["rollout/generated_tok_s"] == pytest.approx(dict.fromkeys(range(6), 100.0))
    assert "grad_norm" not in found
    assert len(list(folder.iterdir())) == 3


def test_who_does_not_lead_writes_nothing_and_lets_go(store: Store, ingest: Ingest) -> None:
    train(ingest, range(3))
    mirror, leads = Remembering(), [False]
    fed = feeding(store, mirror, leads=lambda: leads[0])
    assert fed.step() is None
    assert mirror.steps == []
    leads[0] = True
    feed(fed)
    leads[0] = False
    assert fed.step() is None
    assert mirror.closed == 2


def test_a_run_that_was_deleted_begins_again(store: Store, ingest: Ingest) -> None:
    train(ingest, range(3))
    mirror = Remembering()
    fed = feeding(store, mirror)
    done = fed.step()
    assert done is not None
    assert store.delete_run("demo")
    fed.keep(*done)  # of a run that is gone
    assert fed.step() is None
    train(ingest, range(2))
    feed(fed)
    assert [each.step for each in mirror.steps] == [0, 1, 2, 0, 1]
    assert mirror.opened == [(1, 0), (1, 0)]


async def test_a_mirror_that_fails_is_tried_again_and_the_others_go_on(
    store: Store, ingest: Ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeding_module, "AFTER_FAILURE_S", 0.05)
    train(ingest, range(3))
    broken, sound = Remembering(), Remembering()
    sound.name = "sound"
    broken.failures = 2

    with capture_logs() as logs:
        task = asyncio.create_task(
            keep_feeding(
                [feeding(store, broken), feeding(store, sound)], write=at_once, every_s=0.05
            )
        )
        await until(lambda: len(broken.steps) == 3 and len(sound.steps) == 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert [each.step for each in broken.steps] == [0, 1, 2]
    assert broken.closed >= 3
    assert sound.closed >= 1
    failed = [each for each in logs if each["event"] == "a mirror failed"]
    assert [(each["mirror"], each["cause"]) for each in failed] == [
        ("remembering", "RuntimeError: the tracker is away")
    ] * 2
