"""Steps that wait for groups with signal, on a real queue server with a real (tiny) model."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from headrace.v1 import metrics_pb2 as wire

from services.common.config import Data, Recipe
from services.common.partials import Observation, Ratio
from services.common.training_config import Loss, Trainer
from services.trainer.dispatch import Dispatcher
from tests.services.trainer.folders import make_folder
from tests.services.trainer.river import River, flowing, recipe_of
from tests.services.trainer.test_training import check_balance, check_drained
from tests.waiting import until

Decide = Callable[[str, int], str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


def without_signal(*every: int, of: int) -> Decide:
    """Prompts by their place in the epoch, modulo `of`."""
    return lambda group_id, _: "zero" if int(group_id.split(".")[1]) % of in every else ""


def by_step(river: River, key: str) -> dict[int, float]:
    return {
        step: partial.sum
        for (found, _, step), partial in river.recorder.snapshot().items()
        if found == key and isinstance(partial, Observation)
    }


def ends(*rivers: River) -> list[str]:
    """Reasons of the groups that steps used; what a later attempt says again counts once."""
    events = [event for river in rivers for event in river.recorder._events]
    trained = {e.group_id: e.reason for e in events if e.state == wire.GROUP_STATE_TRAINED}
    return list(trained.values())


@pytest.mark.parametrize("trainer", [{"max_staleness": 0}, {}, {"stale": "drop"}], ids=str)
async def test_every_step_has_as_many_groups_with_signal_as_seats(
    valkey_url: str, tmp_path: Path, model: Path, trainer: dict[str, Any]
) -> None:
    """Also where no group is dispatched before the step before is done: those without signal make
    room for others."""
    recipe = recipe_of(tmp_path, model, valkey_url, trainer=trainer | {"refill": True})
    async with flowing(recipe, decide=without_signal(0, 3, of=5)) as river:
        report: Any = await river.run()
    reasons = ends(river)
    groups = by_step(river, "batch/groups_per_step")
    assert report["steps"] == len(groups) == 5
    assert reasons.count("") == 10
    assert reasons.count("no signal") == len(reasons) - 10 > 0
    check_balance(report, trained=len(reasons))
    check_drained(river)
    assert by_step(river, "batch/samples_per_step") == dict.fromkeys(range(1, 6), 4.0)
    assert report["trained_samples"] == 20
    assert sum(groups.values()) == len(reasons)
    assert all(2 <= number <= 4 for number in groups.values())
    assert report["groups"]["dropped"].keys() <= {"run_ended", "stale"}
    # What is outstanding is held against what may be: never above it.
    shares = [
        partial.numerator / partial.denominator
        for (key, _, _), partial in river.recorder.snapshot().items()
        if key == "pace/outstanding_frac" and isinstance(partial, Ratio)
    ]
    assert shares
    assert max(shares) <= 1


@pytest.mark.parametrize(("changes", "a_step"), [({}, 4), ({"max_refill": 1}, 3)], ids=str)
async def test_a_run_without_any_signal_comes_to_its_end(
    valkey_url: str, tmp_path: Path, model: Path, changes: dict[str, Any], a_step: int
) -> None:
    trainer = {"refill": True, "max_staleness": 0} | changes
    recipe = recipe_of(tmp_path, model, valkey_url, trainer=trainer)
    async with flowing(recipe, decide=lambda *_: "zero") as river:
        report = check_balance(await river.run(), trained=5 * a_step)
    check_drained(river)
    assert by_step(river, "batch/groups_per_step") == dict.fromkeys(range(1, 6), float(a_step))
    assert (report["steps"], report["versions_published"]) == (5, 1)
    assert river.counts("perf/empty_step_total") == {"": 5}
    assert ends(river) == ["no signal"] * 5 * a_step


async def test_prompts_that_run_out_end_the_last_step(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    recipe = recipe_of(
        tmp_path,
        model,
        valkey_url,
        data={"epochs": 1},
        trainer={"refill": True, "max_steps": None},
    )
    async with flowing(recipe, decide=lambda *_: "zero") as river:
        report = check_balance(await river.run(), trained=14)
    assert (report["steps"], report["groups"]["dropped"]) == (4, {})
    assert list(by_step(river, "batch/groups_per_step").values()) == [4, 4, 4, 2]


async def test_without_refill_a_step_takes_what_comes(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    recipe = recipe_of(tmp_path, model, valkey_url, trainer={"max_staleness": 0})
    async with flowing(recipe, decide=without_signal(0, 3, of=5)) as river:
        report = check_balance(await river.run())
    assert by_step(river, "batch/groups_per_step") == dict.fromkeys(range(1, 6), 2.0)
    # Of the ten prompts those at 0, 3, 5 and 8 have no signal.
    assert ends(river).count("no signal") == 4
    assert report["trained_samples"] == 12


async def test_a_run_that_goes_on_makes_the_steps_that_are_left(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    """Groups beyond the seats of steps before and after it are no groups of other steps."""
    # What the first had in hand comes again later and beside others: so many without signal may
    # meet in a step that the default of `max_refill`, as many as it has seats, would end it short.
    settings = {"refill": True, "max_refill": 8, "max_steps": 8, "max_staleness": 1}
    recipe = recipe_of(tmp_path, model, valkey_url, trainer=settings)
    decide = without_signal(0, 3, of=5)
    async with flowing(recipe, decide=decide) as first:
        running = asyncio.create_task(first.run())
        await until(lambda: first.lifecycle.details.get("step") == "4" or running.done())
        first.lifecycle.stopping.set()
        assert await running is None
    assert "no signal" in ends(first)
    async with flowing(recipe, decide=decide) as river:
        report: Any = await river.run()
    reasons = ends(first, river)
    check_balance(report, trained=len(reasons))
    assert (report["steps"], reasons.count("")) == (8, 16)
    assert report["trained_samples"] == 32


def test_groups_beyond_the_seats_of_a_step_are_none_of_the_run_s_number() -> None:
    def a_book(state: dict[str, Any] | None = None) -> Dispatcher:
        return Dispatcher(
            order=lambda _: range(100),
            num_rows=100,
            attempt=1,
            epochs=None,
            max_groups=6,
            max_tries=3,
            max_stale_tries=8,
            state=state,
        )

    book = a_book()
    taken = [book.next_ticket() for _ in range(6)]
    assert book.next_ticket() is None
    book.refilling = 2
    taken += [book.next_ticket() for _ in range(2)]
    assert (book.next_ticket(), book.remaining) == (None, 8)
    for ticket in taken[:5]:
        assert ticket is not None
        book.train(ticket.group_id)
    book.step_ended(5, seats=3)
    assert (book.refilled, book.refilling, book.remaining) == (2, 0, 3)
    # What the open step holds beyond its seats is not of a checkpoint.
    book.refilling = 1
    assert a_book(book.state()).remaining == 3
    # A step that ended before it was full has left the others their groups.
    book.step_ended(2, seats=3)
    assert (book.refilled, book.remaining) == (2, 3)


@pytest.mark.parametrize(
    ("trainer", "loss", "complaint"),
    [
        ({"refill": True, "zero_signal": "keep"}, {}, r"trainer\.refill: only groups that are sk"),
        ({"refill": True}, {"kl_coefficient": 0.1}, r'here zero_signal is "keep"; set trainer\.ze'),
        ({"max_refill": 3}, {}, r"trainer\.max_refill: 3 has no meaning without trainer\.refill"),
    ],
)
def test_what_has_no_meaning_is_refused(
    trainer: dict[str, Any], loss: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        Recipe(data=Data(file="x.jsonl", epochs=1), trainer=Trainer(**trainer), loss=Loss(**loss))


def test_a_step_has_twice_its_groups_at_most_where_nothing_is_said() -> None:
    def recipe(**trainer: Any) -> Recipe:
        data = Data(file="x.jsonl", epochs=1)
        return Recipe(data=data, trainer=Trainer(groups_per_step=8, **trainer))

    assert recipe().max_refill == 0
    assert recipe(refill=True).max_refill == 8
    assert recipe(refill=True, max_refill=20).max_refill == 20
    # What a step is made of makes another experiment.
    assert recipe().identity() != recipe(refill=True).identity()
