"""`headrace runs` against the real REST application on loopback."""

import json
import math
import time
from collections.abc import Iterator

import httpx
import pytest

from services.aggregator.api.app import create_app
from services.aggregator.api.backend import Backend
from services.aggregator.ingest import Ingest
from services.aggregator.retention import DAY_S
from services.aggregator.store import Store
from services.common.errors import UserError
from services.launcher.errors import RunFailed
from tests.services.aggregator.conftest import backend, database, ingest, store
from tests.services.aggregator.making import Producer, observed
from tests.services.launcher.serving import headrace, on_a_terminal, serve

__all__ = ["backend", "database", "ingest", "store"]

LONG = "a-run-whose-name-is-as-long-as-names-may-be-52-bytes"


@pytest.fixture
def url(backend: Backend, ingest: Ingest) -> Iterator[str]:
    """An aggregator that heard of `demo` two hours ago, with a gap of two batches, and of another
    run 20 days ago; runs are kept for 30 days.
    """
    now_s = time.time()
    trainer = Producer("trainer-0")
    trainer.send(ingest, [("loss", observed([1.0]))], step=1199, now_s=now_s - 9000)
    trainer.send(ingest, [("loss", observed([1.0]))], step=1200, now_s=now_s - 7230)
    scorer = Producer("scorer-0", service="scorer")
    scorer.send(ingest, [("reward", observed([0.5]))], step=7, now_s=now_s - 7230, sequence=3)
    old = Producer("trainer-0", run=LONG)
    old.send(ingest, [("loss", observed([1.0]))], step=3, now_s=now_s - 20.2 * DAY_S)
    served = Backend(backend.store, backend.catalogue, backend.writer, keep_s=30 * DAY_S)
    yield from serve(create_app(served))


def test_the_list_says_what_is_known_of_each_run(url: str) -> None:
    titles, demo, other = headrace("runs", "list", url).splitlines()
    assert titles.split("  ")[0] == "run"
    cells = [cell.strip() for cell in demo.split("  ") if cell]
    assert cells == ["demo", "1", "1,200", "2 h ago", "2 h ago", "3", "2", "in 29 d"]
    cells = [cell.strip() for cell in other.split("  ") if cell]
    assert cells == [LONG, "1", "3", "20 d ago", "20 d ago", "2", "0", "in 9 d"]


def test_json_is_the_answer_as_it_is(url: str) -> None:
    printed = headrace("runs", "list", url, "--json")
    assert printed == httpx.get(f"{url}/api/v1/runs").text + "\n"


def test_a_narrow_terminal_wraps_names_and_nothing_else(url: str) -> None:
    status, lines = on_a_terminal("runs", "list", url, columns=80)
    assert status == 0
    assert max(map(len, lines)) <= 80
    assert "demo" in lines[1]
    assert lines[1].endswith("in 29 d")
    assert "".join(line.split(" ")[0] for line in lines[2:]) == LONG


def test_a_terminal_that_is_too_narrow_loses_no_digit(url: str) -> None:
    status, lines = on_a_terminal("runs", "list", url, columns=40)
    assert status == 0
    assert {"1,200", "2 h ago", "in 29 d"} <= {cell.strip() for cell in lines[1].split("  ")}


def test_no_runs(url: str) -> None:
    for run in ("demo", LONG):
        headrace("runs", "delete", url, run, "--yes")
    assert headrace("runs", "list", url) == "no runs\n"


def test_a_deletion_says_what_it_deleted(url: str) -> None:
    assert headrace("runs", "delete", url, "demo", "--yes") == (
        "deleted run demo (1 attempt, step 1,200, 3 producers, last heard of 2 h ago)\n"
    )
    with pytest.raises(UserError, match="no run 'demo'; runs here: a-run-whose"):
        headrace("runs", "delete", url, "demo", "--yes")


def test_a_deletion_without_a_terminal_needs_yes(url: str) -> None:
    with pytest.raises(UserError, match=r"--yes: there is no terminal.*nothing was deleted"):
        headrace("runs", "delete", url, "demo")
    assert "demo" in headrace("runs", "list", url)


def test_a_deletion_asks_on_a_terminal(url: str) -> None:
    status, lines = on_a_terminal("runs", "delete", url, "demo", columns=120, typed="n\n")
    assert status == 1
    assert lines[-1].endswith("nothing was deleted")
    assert "demo" in headrace("runs", "list", url)
    status, lines = on_a_terminal("runs", "delete", url, "demo", columns=120, typed="y\n")
    assert status == 0
    assert "deleted run demo (" in lines[-1]
    assert "demo" not in headrace("runs", "list", url)


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_a_name_that_leads_elsewhere_is_none(url: str, name: str) -> None:
    with pytest.raises(UserError, match=r"RUN: .* is no name of a run"):
        headrace("runs", "delete", url, name, "--yes")


def test_how_long_a_run_is_kept(url: str) -> None:
    kept = headrace("runs", "keep", url, "demo", "2.5")
    assert kept.startswith("run demo is kept 2.5 days after it was last heard of: until 20")
    assert kept.endswith("Z (in 2 d)\n")
    assert json.loads(headrace("runs", "list", url, "--json"))["runs"][0]["keep_days"] == 2.5
    assert headrace("runs", "keep", url, "demo", "forever") == "run demo is kept forever\n"
    assert " forever" in headrace("runs", "list", url)
    kept = headrace("runs", "keep", url, "demo", "default")
    assert kept.startswith("run demo is kept as long as this aggregator keeps runs: until 20")
    answer = json.loads(headrace("runs", "keep", url, "demo", "1", "--json"))
    assert (answer["run"], answer["keep_days"]) == ("demo", 1.0)


@pytest.mark.parametrize(
    ("days", "says"),
    [
        ("0", "greater than 0"),
        ("36501", "less than or equal to 36500"),
        ("soon", "DAYS: 'soon' is no number of days; write one, or forever, or default"),
        ("nan", "DAYS: 'nan' is no number"),
        ("inf", "DAYS: 'inf' is no number"),
    ],
)
def test_a_time_that_is_none(url: str, days: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        headrace("runs", "keep", url, "demo", days)


def test_a_run_that_is_not_there_is_not_kept(url: str) -> None:
    with pytest.raises(UserError, match="no run 'none'; runs here: demo, a-run"):
        headrace("runs", "keep", url, "none", "3")


def test_without_a_limit_of_the_aggregator_runs_are_kept_forever(
    backend: Backend, ingest: Ingest
) -> None:
    assert backend.keep_s == math.inf
    Producer("p").send(ingest, [("loss", observed([1.0]))])
    for url in serve(create_app(backend)):
        assert headrace("runs", "list", url).splitlines()[1].endswith("  forever")
        kept = headrace("runs", "keep", url, "demo", "default")
        assert kept == "run demo is kept as long as this aggregator keeps runs: forever\n"


def test_a_store_that_fails_is_no_mistake_of_the_user(backend: Backend, store: Store) -> None:
    with store.engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE runs")
    for url in serve(create_app(backend)):
        with pytest.raises(RunFailed, match="the store failed"):
            headrace("runs", "list", url)
