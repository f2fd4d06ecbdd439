"""The history of one metric: ranges, windows, pages."""

import os
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from services.aggregator.batch import decode
from services.aggregator.ingest import Ingest
from tests.services.aggregator.asking import problem, strict
from tests.services.aggregator.making import (
    INF,
    NAN,
    NOW_S,
    Producer,
    count,
    observed,
    placed,
    ratio,
)

HISTORY = "/api/v1/runs/demo/metrics"


async def test_history_is_strict_json_and_keeps_every_step(
    client: httpx.AsyncClient, ingest: Ingest
) -> None:
    """C27."""
    for step, value in ((1, 1.0), (2, NAN), (3, INF)):
        Producer("p", boot_id=str(step)).send(ingest, [("loss", observed([value]))], step=step)
    answer = strict(await client.get("/api/v1/runs/demo/metrics/loss"))
    assert answer["points"] == [
        {"x": 1, "value": 1.0},
        {"x": 2, "value": None, "nan": 1},
        {"x": 3, "value": None, "pos_inf": 1},
    ]
    assert (answer["axis"], answer["reduce"], answer["width"]) == ("step", "mean", 1)


async def test_history_by_producer(client: httpx.AsyncClient, ingest: Ingest) -> None:
    for number in (0, 1):
        Producer(f"generator-{number}").send(
            ingest, [("rollout/duration_s", observed([1.0 + number]))], step=1
        )
    path = "/api/v1/runs/demo/metrics/rollout/duration_s?group_by=producer&reduce=max"
    answer = strict(await client.get(path))
    assert answer["points"] == [{"x": 1, "value": 2.0}]
    assert answer["by_producer"] == {
        "generator-0": [{"x": 1, "value": 1.0}],
        "generator-1": [{"x": 1, "value": 2.0}],
    }


@pytest.fixture
def recorded(ingest: Ingest) -> None:
    """`loss` at one step."""
    Producer("trainer-0").send(ingest, [("loss", observed([1.0]))])


@pytest.fixture
def fifty(ingest: Ingest) -> None:
    """`loss` at steps 0 to 49, one every 10 s."""
    producer = Producer("trainer-0")
    for step in range(50):
        producer.send(ingest, [("loss", observed([step]))], step=step, now_s=NOW_S + 10 * step)


@pytest.mark.usefixtures("fifty")
async def test_ranges_are_half_open_and_capped(client: httpx.AsyncClient) -> None:
    """C29."""

    async def xs(query: str) -> list[int]:
        answer = strict(await client.get(f"/api/v1/runs/demo/metrics/loss?{query}"))
        return [point["x"] for point in answer["points"]]

    assert await xs("since=10&until=13") == [10, 11, 12]
    assert await xs("since=10&until=10") == []
    assert await xs("since=-5&until=2") == [0, 1]
    assert await xs("max_points=1000000000") == list(range(50))
    assert await xs("max_points=10") == list(range(0, 50, 5))
    assert await xs("max_points=1") == [0]
    start = int(NOW_S)
    assert start == 1_800_000_000  # 2027-01-15T08:00:00Z
    assert await xs(f"axis=time&since={start + 20}&until={start + 40}") == [start + 20, start + 30]
    for moment in ("08:00:00", "08:00:00Z", "13:00:00%2B05:00", "03:00:00-05:00"):
        assert await xs(f"axis=time&until=2027-01-15T{moment}") == [], moment
        assert (await xs(f"axis=time&since=2027-01-15T{moment}"))[0] == start, moment


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("max_points=0", "max_points"),
        ("max_points=-1", "max_points"),
        ("max_points=many", "max_points"),
        ("max_points=5.0", "a whole number"),
        ("max_point=5", "'max_point' is no parameter of this endpoint; it has axis, reduce, since"),
        ("since=5&until=4", "since"),
        ("since=soon", "since: 'soon' is not a step"),
        ("since=1e3", "since"),
        (f"since={10**30}", "since"),
        (f"since={10**400}", "since"),
        (f"axis=time&since={10**400}", "since"),
        ("axis=time&since=soon", "a time"),
        ("axis=time&since=nan", "since"),
        ("axis=time&until=inf", "until"),
        ("axis=time&since=2027-01-15T13:00:00+05:00", "%2B"),
        ("axis=wall", "axis"),
        ("reduce=median", "reduce"),
        ("reduce=sum", "not for loss (observation); choose one of mean, min"),
        ("group_by=step", "group_by"),
    ],
)
async def test_a_range_or_reduction_that_cannot_be_says_what_to_do(
    client: httpx.AsyncClient, query: str, says: str
) -> None:
    assert says in await problem(client, f"/api/v1/runs/demo/metrics/loss?{query}", 422)


@pytest.mark.usefixtures("recorded")
async def test_a_declared_key_that_nothing_recorded_has_no_points(
    client: httpx.AsyncClient,
) -> None:
    for query in ("", "?axis=time&reduce=p95", "?group_by=producer"):
        answer = strict(await client.get(f"/api/v1/runs/demo/metrics/perf/step_s{query}"))
        assert answer["points"] == []


def send_steps(ingest: Ingest, steps: range, *, key: str = "loss", boot_id: str = "boot-1") -> None:
    """One value a step, that of the step, in one batch."""
    items = [item for step in steps for item in placed([(key, observed([step]))], step=step)]
    request = Producer("trainer-0", boot_id=boot_id).batch(items)
    ingest.take(decode(request), now_s=NOW_S)


async def pages(client: httpx.AsyncClient, query: str, *, key: str = "loss") -> list[list[Any]]:
    """The points of all pages."""
    found, token = [], ""
    while True:
        answer = strict(await client.get(f"{HISTORY}/{key}?{query}{token}"))
        found.append(answer["points"])
        assert len(found) < 100, "the pages do not end"
        if answer["next_page"] is None:
            return found
        token = f"&page={answer['next_page']}"


class TestPages:
    """C29."""

    async def test_each_point_comes_once_and_the_last_page_says_so(
        self, client: httpx.AsyncClient, ingest: Ingest
    ) -> None:
        send_steps(ingest, range(250))
        expected = [{"x": step, "value": float(step)} for step in range(250)]
        for limit, sizes in (
            ("", [250]),
            ("limit=100", [100, 100, 50]),
            ("limit=99", [99, 99, 52]),
            ("limit=125", [125, 125]),
            ("limit=250", [250]),
            ("limit=1000000000", [250]),
        ):
            found = await pages(client, limit)
            assert [len(page) for page in found] == sizes, limit
            assert [point for page in found for point in page] == expected, limit
        for number in (99, 100):
            found = await pages(client, f"limit=100&until={number}")
            assert [len(page) for page in found] == [number]

    async def test_a_page_has_1000_points_by_default_and_10000_at_most(
        self, client: httpx.AsyncClient, ingest: Ingest
    ) -> None:
        send_steps(ingest, range(10_001))
        for query, most, sizes in (
            ("", 1000, 1),
            ("max_points=2000", 2000, 2),
            # A wish for a billion counts as one for 10,000: windows of 2 steps, on one page.
            ("max_points=1000000000&limit=1000000000", 10_000, 1),
        ):
            width = strict(await client.get(f"{HISTORY}/loss?{query}"))["width"]
            assert 10_001 / most <= width < 2 * (10_001 / most), query
            found = await pages(client, query)
            assert len(found) == sizes
            assert sum(map(len, found)) == -(-10_001 // width)
            if "limit" not in query:
                assert [len(page) for page in found[:-1]] == [1000] * (sizes - 1)
        assert found[0][0] == {"x": 0, "value": 0.5, "low": 0.0, "high": 1.0}
        assert found[0][-1]["x"] == 10_000
        assert found[0][-1]["value"] == 10_000.0

    @pytest.mark.usefixtures("fifty")
    @pytest.mark.parametrize("limit", ["0", "-1", "many", ""])
    async def test_a_limit_that_is_no_page_is_refused(
        self, client: httpx.AsyncClient, limit: str
    ) -> None:
        assert "limit" in await problem(client, f"{HISTORY}/loss?limit={limit}", 422)

    async def test_points_recorded_meanwhile_shift_nothing(
        self, client: httpx.AsyncClient, ingest: Ingest
    ) -> None:
        send_steps(ingest, range(0, 300, 2))
        query = f"{HISTORY}/loss?max_points=100&limit=40"
        first = strict(await client.get(query))
        assert (first["width"], first["points"][-1]["x"]) == (3, 117)
        # Behind the cursor, in front of it, and beyond the end.
        send_steps(ingest, range(1, 300, 2), boot_id="boot-2")
        send_steps(ingest, range(300, 900), boot_id="boot-3")
        second = strict(await client.get(f"{query}&page={first['next_page']}"))
        assert second["width"] == 3
        assert [point["x"] for point in second["points"]] == list(range(120, 240, 3))
        assert second["points"][0] == {"x": 120, "value": 121.0, "low": 120.0, "high": 122.0}
        again = strict(await client.get(f"{query}&page={first['next_page']}"))
        assert again == second

    async def test_pages_are_the_windows_of_the_whole_also_where_steps_are_missing(
        self, client: httpx.AsyncClient, ingest: Ingest
    ) -> None:
        send_steps(ingest, range(1, 100, 3))
        send_steps(ingest, range(150, 200, 5), boot_id="boot-2")
        for query in ("max_points=30", "max_points=30&since=2&until=190", "max_points=7"):
            (whole,) = await pages(client, query)
            for limit in (1, 2, 5):
                found = await pages(client, f"{query}&limit={limit}")
                assert [point for page in found for point in page] == whole, (query, limit)

    async def test_pages_by_time_and_by_producer(
        self, client: httpx.AsyncClient, ingest: Ingest
    ) -> None:
        for number in range(40):
            Producer(f"generator-{number % 3}", boot_id=str(number)).send(
                ingest, [("rollout/inflight", observed([1.0]))], now_s=NOW_S + 3 * number
            )
        query = "axis=time&group_by=producer&reduce=sum_last&max_points=6"
        path = f"{HISTORY}/rollout/inflight?{query}"
        whole = strict(await client.get(path))
        assert whole["width"] == 20
        assert [point["value"] for point in whole["points"]] == [3.0] * 6
        joined: dict[str, list[Any]] = {}
        token = ""
        for _ in range(3):
            page = strict(await client.get(f"{path}&limit=2{token}"))
            for producer, points in page["by_producer"].items():
                joined.setdefault(producer, []).extend(points)
            joined.setdefault("", []).extend(page["points"])
            token = f"&page={page['next_page']}"
        assert page["next_page"] is None
        assert joined.pop("") == whole["points"]
        assert joined == whole["by_producer"]

    async def test_a_silent_replica_still_counts_on_the_next_page(
        self, client: httpx.AsyncClient, ingest: Ingest
    ) -> None:
        Producer("generator-0").send(ingest, [("rollout/inflight", observed([30.0]))], step=9)
        other = Producer("generator-1")
        for step in (9, 10, 11):
            other.send(
                ingest, [("rollout/inflight", observed([5.0]))], step=step, now_s=NOW_S + step - 8
            )
        found = await pages(client, "limit=1", key="rollout/inflight")
        assert [point["value"] for (point,) in found] == [35.0, 35.0, 35.0]

    @pytest.mark.usefixtures("fifty")
    async def test_a_token_of_another_query_is_refused(self, client: httpx.AsyncClient) -> None:
        first = strict(await client.get(f"{HISTORY}/loss?limit=10"))
        token = first["next_page"]
        for query in (
            f"page={token}&since=1",
            f"page={token}&until=40",
            f"page={token}&axis=time",
            f"page={token}&reduce=max",
            f"page={token}&attempt=1",
            f"page={token}&group_by=producer",
            f"page={token}&max_points=20",
            f"page={token[:-3]}AAA",
            f"page={'B' + token[1:]}",
            f"page={token[:-1]}",
            f"page={token}A",
            "page=",
            "page=%00",
            "page=ü",
            "page=2",
        ):
            detail = await problem(client, f"{HISTORY}/loss?{query}", 422)
            assert "leave it out to begin again" in detail, query
        assert "page" in await problem(client, f"{HISTORY}/kl?page={token}", 422)
        # The same query in other words, and another page size.
        same = strict(
            await client.get(f"{HISTORY}/loss?limit=5&reduce=mean&axis=step&page={token}")
        )
        assert [point["x"] for point in same["points"]] == list(range(10, 15))


@pytest.fixture
def karachi() -> Iterator[None]:
    """A host in another time zone."""
    held = os.environ.get("TZ")
    os.environ["TZ"] = "Asia/Karachi"
    time.tzset()
    yield
    if held is None:
        del os.environ["TZ"]
    else:
        os.environ["TZ"] = held
    time.tzset()


@pytest.mark.usefixtures("fifty", "karachi")
async def test_the_hosts_zone_does_not_matter(client: httpx.AsyncClient) -> None:
    """C29: a time without a zone is UTC."""
    assert time.localtime(NOW_S).tm_hour == 13, "this host has no zone Asia/Karachi"
    for moment in ("08:00:20", "08:00:20Z", "13:00:20%2B05:00"):
        answer = strict(
            await client.get(f"{HISTORY}/loss?axis=time&since=2027-01-15T{moment}&limit=1")
        )
        assert answer["points"][0]["x"] == int(NOW_S) + 20, moment


async def test_the_envelope_keeps_what_a_wide_window_hides(
    client: httpx.AsyncClient, ingest: Ingest
) -> None:
    producer = Producer("p")
    for step in range(10):
        producer.send(ingest, [("kl", ratio(9 if step == 4 else 1, 10))], step=step)
    answer = strict(await client.get(f"{HISTORY}/kl?max_points=2"))
    assert answer["points"] == [
        {"x": 0, "value": pytest.approx(0.26), "low": 0.1, "high": 0.9},
        {"x": 5, "value": 0.1, "low": 0.1, "high": 0.1},
    ]


async def test_another_attempt_can_be_asked_for(client: httpx.AsyncClient, ingest: Ingest) -> None:
    trainer = Producer("trainer-0")
    for attempt, steps in ((1, range(5)), (2, range(3, 6))):
        for step in steps:
            trainer.send(ingest, [("queue/lost_total", count(attempt))], step=step, attempt=attempt)

    async def values(query: str) -> list[tuple[int, float]]:
        answer = strict(await client.get(f"{HISTORY}/queue/lost_total?{query}"))
        return [(point["x"], point["value"]) for point in answer["points"]]

    assert await values("") == [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]
    assert await values("attempt=1") == [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1)]
    assert await values("attempt=2") == [(3, 2), (4, 2), (5, 2)]
    assert await values("attempt=3") == []
    for refused in ("-1", "x", str(2**63)):
        assert "attempt" in await problem(
            client, f"{HISTORY}/queue/lost_total?attempt={refused}", 422
        )
