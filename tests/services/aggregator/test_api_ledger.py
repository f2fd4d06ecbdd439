"""The ledger by REST."""

import httpx
import pytest

from services.aggregator.api.app import create_app
from services.aggregator.api.backend import Backend
from services.aggregator.ingest import Ingest
from services.aggregator.store import Store
from tests.services.aggregator.asking import problem, strict
from tests.services.aggregator.making import NOW_S, Producer, event
from tests.services.aggregator.pruning import prune

RUN = "/api/v1/runs/demo"


@pytest.fixture
def client(backend: Backend) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(backend, clock=lambda: NOW_S))
    return httpx.AsyncClient(transport=transport, base_url="http://aggregator")


@pytest.fixture(autouse=True)
def filled(ingest: Ingest) -> None:
    """Step 3 trained two groups of row 17, of which one was rolled back; others in all ends."""
    events = [
        event("0.5.1.1", "dispatched", row_index=17, age_s=90),
        event("0.5.1.1", "trained", row_index=17, step=3, age_s=80, worker="trainer-0"),
        event("0.5.1.1", "rolled_back", age_s=60),
        event("0.5.2.1", "trained", row_index=17, step=3, age_s=50, reason="no signal"),
        event("0.6.1.1", "dropped", reason="stale", row_index=4, age_s=40),
        event("0.7.1.1", "given_up", reason="failed", row_index=5, age_s=40),
        event("0.8.2.1", "generating", row_index=6, age_s=700, worker="generator-0"),
        event("eval.0.1.3", "scored", age_s=1),
    ]
    Producer("trainer-0").send(ingest, events=events)


async def test_the_ledger_adds_up(client: httpx.AsyncClient) -> None:
    answer = strict(await client.get(f"{RUN}/ledger"))
    states = answer.pop("states")
    assert {state: number for state, number in states.items() if number} == {
        **{"trained": 1, "rolled_back": 1, "dropped": 1, "given_up": 1, "generating": 1}
    }
    (oldest,) = answer["oldest"]
    assert oldest == {
        "group_id": "0.8.2.1",
        "row_index": 6,
        "state": "generating",
        "age_s": 700.0,
        "in_state_s": 700.0,
        "holder": "generator-0",
    }
    assert answer == {
        "run": "demo",
        "dispatched": 5,
        "trained": 1,
        "rolled_back": 1,
        "dropped": 1,
        "given_up": 1,
        "in_flight": 1,
        "balanced": True,
        "dropped_reasons": {"stale": 1},
        "given_up_reasons": {"failed": 1},
        "given_up_groups": ["0.7.1.1"],
        "oldest": [oldest],
        "stuck_after_s": 600.0,
        "num_stuck": 1,
        "stuck": [oldest],
        "num_pruned": 0,
        "evaluation": {"scored": 1},
    }


async def test_a_ledger_that_does_not_add_up_says_so(
    client: httpx.AsyncClient, store: Store
) -> None:
    with store.engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM ledger_groups WHERE group_id = '0.6.1.1'")
    answer = strict(await client.get(f"{RUN}/ledger"))
    assert (answer["dispatched"], answer["balanced"]) == (4, False)


async def test_the_way_of_a_group(client: httpx.AsyncClient) -> None:
    answer = strict(await client.get(f"{RUN}/groups/0.5.1.1"))
    assert (answer["state"], answer["step"], answer["row_index"]) == ("rolled_back", 3, 17)
    assert (answer["epoch"], answer["attempt"], answer["try_number"]) == (0, 1, 1)
    assert [each["state"] for each in answer["events"]] == ["dispatched", "trained", "rolled_back"]
    assert answer["events"][1] == {
        "state": "trained",
        "at": "2027-01-15T07:58:40Z",
        "worker": "trainer-0",
        "again_at": None,
        "again_worker": None,
        "reason": "",
        "step": 3,
    }
    assert answer["stages"]["generation_s"] is None
    assert answer["total_s"] == 10.0


async def test_a_step_and_a_row_name_their_groups(client: httpx.AsyncClient) -> None:
    step = strict(await client.get(f"{RUN}/steps/3"))
    row = strict(await client.get(f"{RUN}/rows/17"))
    assert step["groups"] == row["groups"]
    assert step["num_groups"] == row["num_groups"] == 2
    assert step["groups"][1] == {
        "group_id": "0.5.2.1",
        "epoch": 0,
        "attempt": 2,
        "try_number": 1,
        "row_index": 17,
        "state": "trained",
        "reason": "no signal",
        "step": 3,
        "pruned": False,
    }


async def test_what_was_pruned_is_gone_but_for_its_outcome(
    client: httpx.AsyncClient, store: Store
) -> None:
    before = strict(await client.get(f"{RUN}/ledger"))
    assert prune(store, keep_groups=1) == 4
    after = strict(await client.get(f"{RUN}/ledger"))
    assert after == before | {"num_pruned": 4}
    assert await problem(client, f"{RUN}/groups/0.5.1.1", 410) == (
        "group 0.5.1.1 (row 17) was rolled back, step 3; its events were pruned (the recipe's "
        "ledger.keep_groups)"
    )
    said = await problem(client, f"{RUN}/groups/0.7.1.1", 410)
    assert said.startswith("group 0.7.1.1 (row 5) was given up, failed; ")
    assert [each["pruned"] for each in strict(await client.get(f"{RUN}/rows/17"))["groups"]] == [
        *(True, True)
    ]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/groups/0.9.1.1", "group 0.9.1.1 was never heard of in run demo"),
        ("/groups/nonsense", "no group 'nonsense'; a group's name is epoch.ordinal.attempt.try"),
        ("/rows/99", "no group of row 99 was heard of in run demo"),
        ("/steps/4", "step 4 trained no group of run demo; the latest that has is step 3"),
    ],
)
async def test_what_was_never_heard_of(client: httpx.AsyncClient, path: str, says: str) -> None:
    assert says in await problem(client, f"{RUN}{path}", 404)


@pytest.mark.parametrize("path", ["ledger", "groups/0.5.1.1", "rows/17", "steps/3"])
async def test_a_run_that_is_not_there(client: httpx.AsyncClient, path: str) -> None:
    assert "no run 'none'" in await problem(client, f"/api/v1/runs/none/{path}", 404)


@pytest.mark.parametrize("path", ["rows/-1", "rows/x", "steps/1.5", "steps/-1"])
async def test_a_number_that_is_none(client: httpx.AsyncClient, path: str) -> None:
    await problem(client, f"{RUN}/{path}", 422)


async def test_groups_counts_is_no_group(client: httpx.AsyncClient) -> None:
    assert strict(await client.get(f"{RUN}/groups/counts"))["total"] == 5
