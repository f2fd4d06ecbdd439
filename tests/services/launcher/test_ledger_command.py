"""`headrace ledger` against the real REST application on loopback."""

import time
from collections.abc import Iterator

import httpx
import pytest

from services.aggregator.api.app import create_app
from services.aggregator.api.backend import Backend
from services.aggregator.ingest import Ingest
from services.aggregator.store import Store
from services.common.errors import UserError
from tests.services.aggregator.conftest import backend, database, ingest, store
from tests.services.aggregator.making import Producer, event
from tests.services.aggregator.pruning import prune
from tests.services.launcher.serving import headrace, on_a_terminal, serve

__all__ = ["backend", "database", "ingest", "store"]


@pytest.fixture
def url(backend: Backend, ingest: Ingest) -> Iterator[str]:
    """An aggregator that knows 1,205 groups of a run."""
    events = [
        event(f"0.{n}.1.1", "trained", row_index=n, step=n // 8, age_s=990) for n in range(1200)
    ]
    events += [
        event("0.1200.1.1", "dropped", reason="attempt_ended", row_index=7, age_s=5),
        event("0.1201.1.3", "given_up", reason="failed", row_index=8, age_s=4),
        event("0.1202.1.1", "dispatched", row_index=1202, age_s=705),
        event("0.1202.1.1", "generating", row_index=1202, age_s=700, worker="generator-0"),
        event("0.1202.1.1", "generating", row_index=1202, age_s=50, worker="generator-1"),
        event("0.1203.1.1", "scored", row_index=1203, age_s=9, worker="scorer-0"),
        event("0.7.1.1", "rolled_back", age_s=3),
    ]
    Producer("trainer-0").send(ingest, events=events, now_s=time.time())
    yield from serve(create_app(backend))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_the_ledger_of_a_run(url: str) -> None:
    *said, titles, oldest, other = headrace("ledger", url, "demo").splitlines()
    assert said == [
        "1,204 dispatched = 1,199 trained + 1 rolled back + 1 dropped + 1 given up + 2 in flight: "
        "balanced",
        "in flight: 1 generating, 1 scored",
        "dropped: 1 attempt ended",
        "given up: 1 failed",
        "given up groups: 0.1201.1.3",
        "in flight for more than 600 s: 0.1202.1.1",
    ]
    assert cells(titles)[0] == "oldest in flight"
    name, row, state, age, in_state, holder = cells(oldest)
    assert (name, row, state, holder) == ("0.1202.1.1", "1,202", "generating", "generator-1")
    assert 705 <= float(age) < 800
    assert float(in_state) < float(age)
    assert (cells(other)[0], cells(other)[-1]) == ("0.1203.1.1", "—")


def test_a_ledger_that_does_not_add_up(url: str, store: Store) -> None:
    with store.engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM ledger_groups WHERE row_index = 3")
    assert headrace("ledger", url, "demo").splitlines()[0].endswith(": NOT BALANCED")


def test_the_way_of_a_group(url: str) -> None:
    first, stages, _, *events = headrace(
        "ledger", url, "demo", "--group", "0.1202.1.1"
    ).splitlines()
    assert first == "group 0.1202.1.1 · row 1,202 · generating"
    assert stages == "wait for a generator 5 s"
    state, _, worker, _, again, why = cells(events[1])
    assert (state, worker, again, why) == ("generating", "generator-0", "generator-1", "—")
    lines = headrace("ledger", url, "demo", "--group", "0.7.1.1").splitlines()
    assert lines[0] == "group 0.7.1.1 · row 7 · rolled back (step 0) · 0 s"
    assert cells(lines[2])[0] == "trained"
    assert cells(lines[2])[-1] == "step 0"


def test_a_step_and_a_row(url: str) -> None:
    first, _, *groups = headrace("ledger", url, "demo", "--step", "149").splitlines()
    assert first == "step 149: 8 groups"
    assert cells(groups[0]) == ["0.1192.1.1", "0", "1", "1", "1,192", "trained", "step 149"]
    first, _, *groups = headrace("ledger", url, "demo", "--row", "7").splitlines()
    assert first == "row 7: 2 groups"
    assert [cells(line)[-2:] for line in groups] == [
        ["rolled back", "step 0"],
        ["dropped", "attempt ended"],
    ]


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ((), "ledger"),
        (("--group", "0.7.1.1"), "groups/0.7.1.1"),
        (("--row", "7"), "rows/7"),
        (("--step", "0"), "steps/0"),
    ],
)
def test_json_is_the_answer_as_it_is(url: str, options: tuple[str, ...], path: str) -> None:
    printed = headrace("ledger", url, "demo", *options, "--json")
    answer = httpx.get(f"{url}/api/v1/runs/demo/{path}")
    if options:
        assert printed == answer.text + "\n"
    else:  # ages are of their moment
        assert printed.split('"oldest"')[0] == answer.text.split('"oldest"')[0]


def test_what_is_pruned_or_was_never_heard_of_is_said(url: str, store: Store) -> None:
    prune(store, keep_groups=100)
    with pytest.raises(UserError, match=r"group 0\.3\.1\.1 \(row 3\) was trained, step 0; its"):
        headrace("ledger", url, "demo", "--group", "0.3.1.1")
    with pytest.raises(UserError, match=r"group 5\.3\.1\.1 was never heard of"):
        headrace("ledger", url, "demo", "--group", "5.3.1.1")
    assert headrace("ledger", url, "demo", "--step", "0").splitlines()[0] == "step 0: 8 groups"


def test_options_that_are_not_right(url: str) -> None:
    with pytest.raises(UserError, match="--group, --row, --step: give one of them at a time"):
        headrace("ledger", url, "demo", "--row", "1", "--step", "1")
    with pytest.raises(UserError, match=r"--group: '\.\.' is no group"):
        headrace("ledger", url, "demo", "--group", "..")
    with pytest.raises(UserError, match="refuses: row: "):
        headrace("ledger", url, "demo", "--row", "-1")


def test_a_narrow_terminal_loses_no_digit(url: str) -> None:
    status, lines = on_a_terminal("ledger", url, "demo", "--step", "149", columns=50)
    assert status == 0
    assert "0.1192.1" in lines[2]
    assert "1,192" in lines[2]
