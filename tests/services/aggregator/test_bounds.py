"""Names that nobody declared must not fill the aggregator: neither its keys nor its memory."""

import gc
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable

import httpx
import pytest

from services.aggregator.ingest import Ingest
from services.aggregator.metric import MAX_PLACEHOLDER_VALUES
from tests.services.aggregator.asking import strict
from tests.services.aggregator.making import Build, Producer, count

NUM_NAMES = 10_000
BATCH = 500

MAX_GROWTH_BYTES = 200 * 1024
"""Of 8,000 more names. Were each kept, as a text of 90 bytes and its entry in a table, they would
take more than four times as much."""


async def keys(client: httpx.AsyncClient) -> list[str]:
    listed = strict(await client.get("/api/v1/runs/demo/metrics"))["metrics"]
    return [metric["key"] for metric in listed]


async def total(client: httpx.AsyncClient, key: str) -> float:
    answer = strict(await client.get(f"/api/v1/runs/demo/metrics/{key}?max_points=1"))
    (point,) = answer["points"]
    number: float = point["value"]
    return number


def batches(name: Callable[[int], str], numbers: range) -> Iterable[list[tuple[str, Build]]]:
    for start in numbers[::BATCH]:
        yield [(name(number), count(1)) for number in range(start, start + BATCH)]


@pytest.mark.parametrize(
    ("name", "prefix", "other"),
    [
        ("tools/invented-by-the-policy-{}/call_total", "tools/", "tools/other/call_total"),
        ("custom/invented-by-the-user-{}", "custom/", "custom/other"),
    ],
)
async def test_invented_names_leave_keys_and_memory_flat(
    client: httpx.AsyncClient, ingest: Ingest, name: str, prefix: str, other: str
) -> None:
    producer = Producer("generator-0", service="generator")

    def send(numbers: range) -> int:
        """Send new names; the traced bytes that are held afterwards."""
        for deltas in batches(name.format, numbers):
            receipt = producer.send(ingest, deltas)
            assert receipt.accepted == BATCH
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
        return held

    send(range(1500))
    early = await keys(client)
    tracemalloc.start()
    try:
        before = send(range(1500, 2000))
        growth = send(range(2000, NUM_NAMES)) - before
    finally:
        tracemalloc.stop()
    assert growth < MAX_GROWTH_BYTES
    late = await keys(client)
    assert late == early
    assert sum(key.startswith(prefix) for key in late) == MAX_PLACEHOLDER_VALUES + 1
    # Nothing is lost: what has no key of its own is under "other".
    assert await total(client, other) == NUM_NAMES - MAX_PLACEHOLDER_VALUES
    assert await total(client, "ingest/deltas") == NUM_NAMES


async def test_undeclared_keys_are_counted_by_reason_not_by_name(
    client: httpx.AsyncClient, ingest: Ingest
) -> None:
    producer = Producer("generator-0", service="generator")
    reasons: Counter[str] = Counter()
    for deltas in batches("invented-{}/call_total".format, range(NUM_NAMES)):
        receipt = producer.send(ingest, deltas)
        assert receipt.accepted == 0
        reasons.update(each.reason for each in receipt.rejected)
    assert reasons == {"unknown_key": NUM_NAMES}
    assert await total(client, "ingest/rejected/unknown_key") == NUM_NAMES
    assert await keys(client) == ["ingest/gaps", "ingest/rejected/unknown_key"]
