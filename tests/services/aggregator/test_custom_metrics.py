"""Metrics that the recipe declares: taken, refused, documented and answered as ours are."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from services.aggregator.api.backend import Backend
from services.aggregator.catalogue import CATALOGUE, GROUPS, groups_of, with_custom
from services.aggregator.ingest import Ingest
from services.aggregator.metric import ALL, Metric
from services.aggregator.store import Store
from services.common.custom_metrics import CustomMetric
from tests.services.aggregator.making import Producer, count, observed

DECLARED = with_custom(
    {
        "custom/answer_chars": CustomMetric(
            instrument="observation",
            unit="characters",
            reduce="max",
            meaning="Length of an answer.",
        ),
        "custom/tests/run": CustomMetric(
            instrument="count", unit="tests", reduce="rate", meaning="Tests that were run."
        ),
    }
)


@pytest.fixture
def ingest(store: Store) -> Ingest:
    return Ingest(store, catalogue=DECLARED)


@pytest.fixture
def backend(store: Store) -> Iterator[Backend]:
    with ThreadPoolExecutor(1) as writer:
        yield Backend(store, DECLARED, writer)


def test_they_stand_beside_ours() -> None:
    assert DECLARED.metrics[: len(CATALOGUE.metrics)] == CATALOGUE.metrics
    assert DECLARED.metric("custom/answer_chars", instrument="observation") == Metric(
        "custom/answer_chars", "observation", "characters", "max", ALL, "Length of an answer."
    )
    assert groups_of(CATALOGUE) == GROUPS
    *ours, custom = groups_of(DECLARED)
    assert tuple(ours) == GROUPS
    assert [metric.key for metric in custom.metrics] == ["custom/answer_chars", "custom/tests/run"]


def test_another_instrument_than_declared_is_refused(ingest: Ingest) -> None:
    receipt = Producer("scorer-0", service="scorer").send(
        ingest,
        [
            ("custom/answer_chars", count(3)),
            ("custom/tests/run", count(3)),
            ("custom/undeclared", observed([1.0])),
        ],
    )
    assert receipt.accepted == 2
    [rejected] = receipt.rejected
    assert (rejected.key, rejected.reason) == ("custom/answer_chars", "wrong_instrument")
    assert rejected.detail == "declared as observation, sent as count"


async def test_answers_have_their_unit_and_default_reduction(
    client: httpx.AsyncClient, ingest: Ingest, backend: Backend
) -> None:
    scorer = Producer("scorer-0", service="scorer")
    scorer.send(ingest, [("custom/answer_chars", observed([3.0, 8.0]))])
    scorer.send(ingest, [("custom/tests/run", count(40))])
    async with client:
        listed = (await client.get("/api/v1/runs/demo/metrics?match=custom")).json()["metrics"]
        found = (await client.get("/api/v1/runs/demo/metrics/custom/answer_chars")).json()
        declared = (await client.get("/api/v1/catalogue")).json()["metrics"]
        page = (await client.get("/docs/metrics")).text
    by_key = {each["key"]: each for each in listed}
    chars = by_key["custom/answer_chars"]
    assert (chars["unit"], chars["reduce"], chars["value"]) == ("characters", "max", 8.0)
    rate = by_key["custom/tests/run"]
    assert (rate["unit"], rate["reduce"]) == ("tests/s", "rate")
    assert (found["unit"], found["reduce"]) == ("characters", "max")
    assert [point["value"] for point in found["points"]] == [8.0]
    [catalogued] = [each for each in declared if each["key"] == "custom/tests/run"]
    assert catalogued["reductions"] == ["rate", "sum"]
    assert catalogued["meaning"] == "Tests that were run."
    assert (catalogued["since"], catalogued["only_when"]) == (None, None)
    assert '<td><code id="custom/answer_chars">' in page
    assert "Declared in the recipe" in page


async def test_the_catalogue_says_on_what_a_key_depends(client: httpx.AsyncClient) -> None:
    async with client:
        declared = (await client.get("/api/v1/catalogue")).json()["metrics"]
    by_key = {each["key"]: each["only_when"] for each in declared}
    assert by_key["group/dropped/{reason}"] == "a group was dropped"
    assert by_key["perf/step_s"] is None
