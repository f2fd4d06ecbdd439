"""The verdict over time: the same as that of each window alone, from one pass over the store."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from sqlalchemy import event as events

from services.aggregator.evidence import read_window
from services.aggregator.ingest import Ingest
from services.aggregator.rules import Name
from services.aggregator.series import find_run
from services.aggregator.store import Store
from services.aggregator.verdict import Verdict, judge
from services.aggregator.verdict_history import VerdictHistory, judge_history
from tests.services.aggregator.asking import problem, strict
from tests.services.aggregator.making import Producer, observed
from tests.services.aggregator.test_evidence import of_the_others, of_the_trainer, record

PATH = "/api/v1/runs/demo/verdict/history"


def past(store: Store, *, num_steps: int = 10, max_points: int = 200) -> VerdictHistory:
    with store.engine.begin() as connection:
        run = find_run(connection, "demo")
        assert run is not None
        return judge_history(connection, run, num_steps=num_steps, max_points=max_points)


def said(found: VerdictHistory) -> list[tuple[int | None, int | None, Name]]:
    return [(each.first_step, each.last_step, each.name) for each in found.verdicts]


def change_after(ingest: Ingest, step: int, *, steps: int) -> None:
    """Steps of 3.1 s: up to `step` the trainer waits 1.9 s of them, then 0.2 s: 6 %."""
    trainer, others = Producer("trainer-0"), Producer("generator-0", service="generator")
    for each in range(1, steps + 1):
        wait_s = 1.9 if each <= step else 0.2
        length = [("perf/step_s", observed([3.1]))]
        trainer.send(ingest, [*of_the_trainer(wait_s), *length], step=each)
        others.send(ingest, of_the_others(), step=each)


def test_a_verdict_of_each_window(ingest: Ingest, store: Store) -> None:
    change_after(ingest, 19, steps=35)
    assert said(past(store)) == [
        (1, 9, "generation-bound"),
        (10, 19, "generation-bound"),
        (20, 29, "balanced"),
        (30, 35, "balanced"),
    ]
    found = past(store).verdicts
    assert found[1].share == pytest.approx(1.9 / 3.1)
    assert (found[2].share, found[2].step_s) == (None, 3.1)
    assert [each.confidence for each in found] == ["medium"] * 4


def test_it_is_that_of_the_window_alone(ingest: Ingest, store: Store) -> None:
    """The last window of twenty steps, by the route of the single verdict."""
    record(ingest, range(1, 60))
    with store.engine.begin() as connection:
        run = find_run(connection, "demo")
        assert run is not None
        alone = judge(read_window(connection, run, num_steps=20))
    last = past(store, num_steps=20).verdicts[-1]

    def told(found: Verdict) -> object:
        return (
            found.name,
            found.first_step,
            found.last_step,
            found.share,
            found.confidence,
            found.step_s,
            found.evidence,
        )

    assert told(last) == told(alone)
    assert (last.first_step, last.last_step, last.confidence) == (40, 59, "high")


def test_windows_of_a_long_run_are_wider(ingest: Ingest, store: Store) -> None:
    record(ingest, range(1, 101))
    found = past(store, num_steps=5, max_points=4)
    # 26 steps or more, in whole roll-ups of 8.
    assert found.width == 32
    assert [(first, last) for first, last, _ in said(found)] == [
        (2, 31),
        (32, 63),
        (64, 95),
        (96, 100),
    ]


def test_steps_that_were_made_again_are_the_later_attempts(ingest: Ingest, store: Store) -> None:
    record(ingest, range(1, 21))
    record(ingest, range(12, 25), attempt=2, step_s=5.0)
    found = past(store).verdicts
    assert [each.last_step for each in found] == [9, 19, 24]
    assert [each.step_s for each in found] == pytest.approx([3.1, (2 * 3.1 + 8 * 5.0) / 10, 5.0])


def test_too_few_steps_of_a_window_are_said_to_be(ingest: Ingest, store: Store) -> None:
    record(ingest, range(1, 22))
    assert said(past(store))[-1] == (20, 21, "not enough data")
    assert past(store).verdicts[-1].step_s is None


@contextmanager
def counted(store: Store) -> Iterator[list[str]]:
    """The statements that were executed meanwhile."""
    seen: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
        seen.append(statement)

    events.listen(store.engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        events.remove(store.engine, "before_cursor_execute", note)


def test_more_windows_are_no_more_statements(ingest: Ingest, store: Store) -> None:
    record(ingest, range(1, 61))
    numbers = []
    for num_steps in (30, 5):
        with counted(store) as statements:
            found = past(store, num_steps=num_steps)
        numbers.append((len(found.verdicts), len(statements)))
    (few, of_few), (many, of_many) = numbers
    assert (few, many) == (3, 13)
    assert of_few == of_many


async def test_the_route(client: httpx.AsyncClient, ingest: Ingest) -> None:
    change_after(ingest, 19, steps=35)
    found = strict(await client.get(f"{PATH}?window=20"))
    assert (found["run"], found["window"]) == ("demo", 20)
    assert found["verdicts"] == [
        {
            "first_step": 1,
            "last_step": 19,
            "verdict": "generation-bound",
            "share": pytest.approx(1.9 / 3.1),
            "confidence": "medium",
            "step_s": 3.1,
        },
        {
            "first_step": 20,
            "last_step": 35,
            "verdict": "balanced",
            "share": None,
            "confidence": "medium",
            "step_s": 3.1,
        },
    ]
    narrow = strict(await client.get(f"{PATH}?window=2&max_points=5"))
    assert len(narrow["verdicts"]) == 5


async def test_a_run_that_has_just_begun_has_none(
    client: httpx.AsyncClient, ingest: Ingest
) -> None:
    record(ingest, [1])
    assert strict(await client.get(PATH)) == {"run": "demo", "window": 20, "verdicts": []}


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/api/v1/runs/none/verdict/history", 404, "no run 'none'"),
        (f"{PATH}?window=0", 422, "window: "),
        (f"{PATH}?window=1001", 422, "window: "),
        (f"{PATH}?max_points=0", 422, "max_points: "),
        (f"{PATH}?max_points=2001", 422, "max_points: "),
        (f"{PATH}?speed_up=2", 422, "speed_up"),
    ],
)
async def test_mistakes_are_problems(
    client: httpx.AsyncClient, ingest: Ingest, path: str, status: int, says: str
) -> None:
    record(ingest, [1])
    assert says in await problem(client, path, status)
