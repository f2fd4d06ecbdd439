"""A real Prometheus scrapes /metrics, and answers the same queries as we do."""

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from services.aggregator.api.app import create_app
from services.aggregator.api.backend import Backend
from services.aggregator.catalogue import CATALOGUE
from services.aggregator.ingest import Ingest
from services.aggregator.store import Store
from services.common.tokens import Tokens
from tests.services.aggregator import prometheus_server
from tests.services.aggregator.making import Producer, count, observed
from tests.services.aggregator.prometheus_server import Api, wait_until

pytestmark = pytest.mark.skipif(bool(prometheus_server.MISSING), reason=prometheus_server.REASON)

TOKEN = "s3cret"

BUCKETS = 60
"""Of 10 s: what the run `past` lasted."""

TOKENS = "headrace_rollout_generated_tok_s_total"
CALLS = "headrace_tools_call_total"
DURATION = "headrace_rollout_duration_s"

ODD_TOOL = 'say"hi"\\n'


@dataclass(frozen=True, slots=True)
class Both:
    """A real Prometheus and ours, which know the same run."""

    real: Api
    ours: Api
    begin_s: int
    """When that run began, on a boundary of ten minutes."""
    ingest: Ingest


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder = tmp_path_factory.mktemp("prometheus")
    store = Store.open(f"sqlite:///{folder / 'metrics.sqlite'}")
    ingest = Ingest(store)
    begin_s = (int(time.time()) // 600 - 6) * 600
    prometheus_server.backfill(record_past(ingest, begin_s), folder)
    record_live(ingest)
    with ThreadPoolExecutor(1) as writer:
        app = create_app(Backend(store, CATALOGUE, writer), tokens=Tokens(TOKEN))
        with (
            prometheus_server.serving(app) as port,
            prometheus_server.prometheus(folder, scraped_port=port, token=TOKEN) as real,
        ):
            ours = f"http://127.0.0.1:{port}/prometheus"
            headers = {"Authorization": f"Bearer {TOKEN}"}
            yield Both(real, Api(ours, headers), begin_s, ingest)
    store.close()


def record_past(ingest: Ingest, begin_s: int) -> str:
    """The run `past`: two generators for ten minutes; as samples at the end of each bucket, that
    Prometheus might have scraped.
    """
    lines: dict[str, list[str]] = {TOKENS: [], CALLS: [], DURATION: []}
    for number in (0, 1):
        name = f"generator-{number}"
        generator = Producer(name, run="past", service="generator")
        for bucket in range(BUCKETS):
            end_s = begin_s + 10 * bucket + 10
            duration_s = 2 + number + math.sin(bucket)
            tokens = 100 * (number + 1)
            generator.send(
                ingest,
                [
                    ("rollout/generated_tok_s", count(tokens)),
                    ("tools/add/call_total", count(1)),
                    ("rollout/duration_s", observed([duration_s])),
                ],
                step=bucket,
                duration_s=9.9,
                now_s=end_s - 0.001,
            )
            labels = f'run="past",producer="{name}"'
            lines[TOKENS].append(f"{TOKENS}{{{labels}}} {tokens * (bucket + 1)} {end_s}")
            lines[CALLS].append(f'{CALLS}{{{labels},tool="add"}} {bucket + 1} {end_s}')
            lines[DURATION].append(f"{DURATION}{{{labels}}} {duration_s!r} {end_s}")
        generator.send(ingest, now_s=begin_s + 10 * BUCKETS)
    families = [
        (f"# TYPE {name.removesuffix('_total')} {'counter' if 'total' in name else 'gauge'}", held)
        for name, held in lines.items()
    ]
    return "\n".join([line for head, held in families for line in (head, *held)] + ["# EOF\n"])


def record_live(ingest: Ingest) -> None:
    """The run `live`, heard of now."""
    for number in (0, 1):
        Producer(f"generator-{number}", run="live").send(
            ingest,
            [
                ("rollout/generated_tok_s", count(1000)),
                (f"tools/{ODD_TOOL}/call_total", count(3)),
                ("rollout/inflight", observed([2.0])),
            ],
            now_s=time.time(),
        )


def one(api: Api, query: str) -> float | None:
    """The value of a query that has one series; None when it has none."""
    found = api.data("query", query=query)["result"]
    assert len(found) <= 1, found
    return float(found[0]["value"][1]) if found else None


def test_it_is_scraped_and_shows_what_is_known(both: Both) -> None:
    wait_until(lambda: one(both.real, 'up{job="headrace"}') == 1, "up == 1")
    tokens = f'{TOKENS}{{run="live",job="headrace"}}'
    wait_until(lambda: one(both.real, tokens) == 2000, "the total is known")
    assert one(both.real, 'headrace_rollout_inflight{run="live"}') == 4
    (odd,) = both.real.data("query", query=f'{CALLS}{{run="live"}}')["result"]
    assert odd["metric"]["tool"] == ODD_TOOL
    assert float(odd["value"][1]) == 6
    assert one(both.real, "headrace_aggregator_up") == 1
    # What the scraped total is, our own answer is over the producers.
    assert one(both.ours, f'sum({TOKENS}{{run="live"}})') == 2000
    types = both.real.data("metadata", metric=TOKENS)
    assert types[TOKENS][0]["type"] == "counter"
    assert types[TOKENS][0]["help"] == both.ours.data("metadata", metric=TOKENS)[TOKENS][0]["help"]


def test_a_total_that_rises_is_seen_to_rise(both: Both) -> None:
    total = 'headrace_recorder_dropped_total{run="live",job="headrace"}'
    producer = Producer("trainer-0", run="live")
    for expected in (5.0, 10.0):
        producer.send(both.ingest, [("recorder/dropped_total", count(5))], now_s=time.time())
        wait_until(lambda: one(both.real, total) == expected, f"the total is {expected}")  # noqa: B023


@pytest.mark.parametrize(
    "query",
    [
        DURATION,
        TOKENS,
        f'{TOKENS}{{producer=~"generator-[1-9]"}}',
        f'{TOKENS}{{producer!~".*-1",run="past"}}',
        '{__name__=~"headrace_rollout_(generated.+|duration_s)",producer!=""}',
        f"rate({TOKENS}[1m])",
        f"sum by (run) (rate({TOKENS}[2m]))",
        f"increase({TOKENS}[1m])",
        f'sum without (producer) (increase({CALLS}{{tool="add"}}[45s]))',
        f"avg_over_time({DURATION}[1m])",
        f"min_over_time({DURATION}[1m])",
        f"max_over_time({DURATION}[90s])",
        f"sum_over_time({DURATION}[1m])",
        f"count_over_time({DURATION}[1m])",
        f"last_over_time({DURATION}[1m])",
        f"max_over_time({TOKENS}[1m])",
        f"{DURATION} offset 2m",
        f"avg_over_time({DURATION}[1m] offset 90s)",
        f"avg by (run) ({DURATION})",
        f"max by (producer, run) ({DURATION})",
        f"min without (producer) ({DURATION})",
        f"count({DURATION})",
        f"sum(rate({TOKENS}[1m])) / sum(rate({CALLS}[1m]))",
        f"{DURATION} / {DURATION} ^ 2",
        f"2 * {DURATION} - 1",
        f"-{DURATION} % 2",
        f"1 / ({DURATION} - {DURATION})",
        f"{DURATION} + headrace_nothing",
        "1 + 2 * 3",
    ],
)
def test_a_query_is_answered_as_by_prometheus(both: Both, query: str) -> None:
    """At times between samples: whether a sample at a window's begin belongs to it differs from one
    Prometheus to the next.
    """
    ranges = {"start": both.begin_s + 245, "end": both.begin_s + 10 * BUCKETS - 5, "step": 20}
    real = both.real.data("query_range", query=query, **ranges)
    ours = both.ours.data("query_range", query=query, **ranges)
    assert by_labels(ours) == by_labels(real)
    assert bool(real["result"]) == ("nothing" not in query)
    moment = both.begin_s + 335
    real, ours = (api.data("query", query=query, time=moment) for api in (both.real, both.ours))
    assert ours["resultType"] == real["resultType"]
    if real["resultType"] == "vector":
        assert by_labels(ours) == by_labels(real)


def by_labels(data: Any) -> dict[str, Any]:
    """Values by the labels of their series, to be compared; NaN is written as text."""
    found = {}
    for each in data["result"]:
        labels = ",".join(f"{k}={v}" for k, v in sorted(each["metric"].items()))
        values = each["values"] if "values" in each else [each["value"]]
        found[labels] = [
            (x, "NaN" if value == "NaN" else pytest.approx(float(value), rel=1e-9, abs=1e-12))
            for x, value in values
        ]
    return found


def test_labels_are_found_as_by_prometheus(both: Both) -> None:
    within = {"start": both.begin_s, "end": both.begin_s + 600}
    for path, match in (
        ("series", f'{TOKENS}{{run="past"}}'),
        ("series", f'{{run="past",producer=~".*-0",__name__=~"{CALLS}|{DURATION}"}}'),
        ("labels", f'{CALLS}{{run="past"}}'),
        ("label/producer/values", f'{TOKENS}{{run="past"}}'),
        ("label/tool/values", f'{{run="past",producer="generator-1",__name__="{CALLS}"}}'),
        ("label/__name__/values", '{run="past",tool="add"}'),
    ):
        real = both.real.data(path, match=match, **within)
        ours = both.ours.data(path, match=match, **within)
        assert sorted(ours, key=str) == sorted(real, key=str), (path, match)
        assert ours
