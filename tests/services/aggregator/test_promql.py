"""PromQL over the store: what each expression means, and what is refused."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from services.aggregator.api.app import create_app
from services.aggregator.api.backend import Backend
from services.aggregator.catalogue import CATALOGUE
from services.aggregator.ingest import Ingest
from services.aggregator.promql.parsing import MAX_SYNTAX
from services.aggregator.store import Store
from tests.services.aggregator.making import NAN, NOW_S, Producer, count, observed, ratio

API = "/prometheus/api/v1"

TOKENS = "headrace_rollout_generated_tok_s_total"

TWO_NAMES = '{__name__=~"headrace_rollout_(duration_s|generated_tok_s_total)"}'

MINUTES = 10
"""How long the run of these tests lasts."""

END_S = NOW_S + 60 * MINUTES


Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastAPI]:
    """Four generators at 1,000 tokens/s, a trainer whose loss is the number of the bucket, for ten
    minutes from NOW_S; a second run with two tools. Only read.
    """
    store = Store.open(f"sqlite:///{tmp_path_factory.mktemp('promql') / 'metrics.sqlite'}")
    ingest = Ingest(store)
    generators = [Producer(f"generator-{n}", service="generator") for n in range(4)]
    trainer = Producer("trainer-0")
    for bucket in range(6 * MINUTES):
        at_s = NOW_S + 10 * bucket + 9.999
        placed: dict[str, Any] = {"step": bucket, "duration_s": 9.999, "now_s": at_s}
        for number, generator in enumerate(generators):
            generator.send(
                ingest,
                [
                    ("rollout/generated_tok_s", count(10_000)),
                    ("rollout/duration_s", observed([1.0] * (number + 1))),
                ],
                **placed,
            )
        trainer.send(ingest, [("loss", observed([bucket])), ("kl/3+", ratio(1, 4))], **placed)
    other = Producer("generator-0", run="tools", service="generator")
    calls = [("tools/add/call_total", count(5)), ("tools/sub/call_total", count(7))]
    other.send(ingest, calls, now_s=NOW_S + 5)
    with ThreadPoolExecutor(1) as writer:
        yield create_app(Backend(store, CATALOGUE, writer), clock=lambda: END_S)
    store.close()


def asking(app: FastAPI) -> Ask:
    """Asks the API of an application; the data of a good answer."""

    async def ask(path: str, **parameters: Any) -> Any:
        named = {name.replace("match", "match[]"): value for name, value in parameters.items()}
        async with client_of(app) as client:
            response = await client.get(f"{API}/{path}", params=named)
            assert response.status_code == 200, response.text
            # A form says the same.
            posted = await client.post(f"{API}/{path}", data=named)
        assert posted.json() == response.json()
        answer = response.json()
        assert answer["status"] == "success"
        return answer["data"]

    return ask


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://aggregator")


@pytest.fixture
def promql(filled: FastAPI) -> Ask:
    """Asks the store that is filled."""
    return asking(filled)


@pytest.fixture
def fresh(backend: Backend) -> Ask:
    """Asks the test's own store."""
    return asking(create_app(backend, clock=lambda: END_S))


async def vector(promql: Ask, query: str, at_s: float = END_S) -> dict[str, float]:
    """By its labels without run and name, the value of each series."""
    data = await promql("query", query=query, time=at_s)
    assert data["resultType"] == "vector"
    return {
        ",".join(
            value for label, value in sorted(each["metric"].items()) if label not in HIDDEN
        ): float(each["value"][1])
        for each in data["result"]
    }


HIDDEN = ("run", "__name__")


async def test_four_generators_read_as_four_thousand_tokens_a_second(
    promql: Ask,
) -> None:
    fleet = f"sum by (run) (rate({TOKENS}[1m]))"
    assert await vector(promql, fleet) == {"": pytest.approx(4000, rel=1e-4)}
    alone = await vector(promql, f"rate({TOKENS}[1m])")
    assert alone == {f"generator-{n}": pytest.approx(1000, rel=1e-4) for n in range(4)}
    over = await promql("query_range", query=fleet, start=NOW_S + 60, end=END_S, step="15s")
    (series,) = over["result"]
    assert series["metric"] == {"run": "demo"}
    assert [x for x, _ in series["values"]] == list(range(int(NOW_S) + 60, int(END_S) + 1, 15))
    assert all(float(value) == pytest.approx(4000, rel=1e-3) for _, value in series["values"])


@pytest.mark.parametrize("range_s", [60, 120, 300, 600])
async def test_a_rate_is_the_rest_apis_for_the_same_window(
    promql: Ask, filled: FastAPI, range_s: int
) -> None:
    async with client_of(filled) as client:
        rest = await client.get(
            "/api/v1/runs/demo/metrics/rollout/generated_tok_s",
            params={
                "axis": "time",
                "reduce": "rate",
                "max_points": 60 * MINUTES // range_s,
                "group_by": "producer",
            },
        )
    history = rest.json()
    assert (history["width"], len(history["points"])) == (range_s, 60 * MINUTES // range_s)
    for number, pooled in enumerate(history["points"]):
        until = pooled["x"] + range_s
        ours = await vector(promql, f"sum by (run) (rate({TOKENS}[{range_s}s]))", until)
        assert ours == {"": pytest.approx(pooled["value"], rel=1e-9)}
        assert await vector(promql, f"rate({TOKENS}[{range_s}s])", until) == {
            producer: pytest.approx(points[number]["value"], rel=1e-9)
            for producer, points in history["by_producer"].items()
        }


async def test_counters_are_totals_and_gauges_the_value_of_their_bucket(
    promql: Ask,
) -> None:
    assert await vector(promql, f"sum({TOKENS})") == {"": 4 * 10_000 * 6 * MINUTES}
    assert await vector(promql, f"sum({TOKENS})", NOW_S + 30) == {"": 4 * 30_000}
    # Within a bucket it is that of the one before; before the first there is none.
    assert await vector(promql, f"sum({TOKENS})", NOW_S + 39) == {"": 4 * 30_000}
    assert await vector(promql, TOKENS, NOW_S + 9) == {}
    loss = "headrace_loss"
    assert await vector(promql, loss, NOW_S + 30) == {"trainer-0": 2}
    assert await vector(promql, f"increase({TOKENS}[30s])") == {
        f"generator-{n}": pytest.approx(30_000) for n in range(4)
    }


@pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)
async def test_a_counter_that_stands_still_is_not_stale_while_its_producer_is_heard_of(
    fresh: Ask, ingest: Ingest
) -> None:
    producer = Producer("generator-0")
    calls = [("tools/add/call_total", count(5)), ("tools/latency_s", observed([1.0]))]
    producer.send(ingest, calls, now_s=NOW_S + 5)
    producer.send(ingest, now_s=NOW_S + 400)
    total, add = "headrace_tools_call_total", "generator-0,add"
    assert await vector(fresh, total, NOW_S + 399) == {add: 5}
    assert await vector(fresh, f"increase({total}[1m])", NOW_S + 390) == {add: 0}
    assert await vector(fresh, total, NOW_S + 699) == {add: 5}
    assert await vector(fresh, total, NOW_S + 701) == {}
    latency = "headrace_tools_latency_s"
    assert await vector(fresh, latency, NOW_S + 309) == {"generator-0": 1}
    assert await vector(fresh, latency, NOW_S + 311) == {}


@pytest.mark.parametrize(
    ("query", "result"),
    [
        # The loss of bucket n is n; the samples of the last minute are 54 to 59.
        ("avg_over_time(headrace_loss[1m])", {"trainer-0": 56.5}),
        ("min_over_time(headrace_loss[1m])", {"trainer-0": 54}),
        ("max_over_time(headrace_loss[1m])", {"trainer-0": 59}),
        ("sum_over_time(headrace_loss[1m])", {"trainer-0": 339}),
        ("count_over_time(headrace_loss[1m])", {"trainer-0": 6}),
        ("last_over_time(headrace_loss[1m])", {"trainer-0": 59}),
        ("headrace_loss offset 1m", {"trainer-0": 53}),
        ("avg_over_time(headrace_loss[1m] offset 1m)", {"trainer-0": 50.5}),
        ("headrace_loss * 2 + 1", {"trainer-0": 119}),
        ("2 ^ (headrace_loss - 57)", {"trainer-0": 4}),
        ("-headrace_loss % 50", {"trainer-0": -9}),
        ("headrace_loss / headrace_loss", {"trainer-0": 1}),
        ('headrace_kl_by_lag{lag="3+"}', {"3+,trainer-0": 0.25}),
        # A pooled mean: (1 + 2 + 3 + 4) observations of 1 s; each producer's is 1 s too.
        ("headrace_pooled_rollout_duration_s", {"": 1}),
        ("sum by (run) (headrace_rollout_duration_s)", {"": 4}),
        ("count without (producer) (headrace_rollout_duration_s)", {"": 4}),
        (
            f'sum by (producer) ({TOKENS}{{producer=~".*-[01]"}}) / 1000',
            {
                "generator-0": 600,
                "generator-1": 600,
            },
        ),
        (f'max({TOKENS}{{producer!~"generator-[1-3]"}})', {"": 600_000}),
        (f'count({TOKENS}{{producer!="generator-1",run="demo"}})', {"": 3}),
        (f'{TOKENS}{{run="other"}}', {}),
        (f"sum(rate({TOKENS}[1m])) / count({TOKENS})", {"": 60_000 / 59.999}),
        ("headrace_nothing", {}),
    ],
)
async def test_expressions(promql: Ask, query: str, result: dict[str, float]) -> None:
    found = await vector(promql, query)
    assert found == {labels: pytest.approx(value) for labels, value in result.items()}


@pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)
async def test_a_mean_of_means_is_not_the_pooled_mean(fresh: Ask, ingest: Ingest) -> None:
    Producer("generator-0").send(ingest, [("rollout/duration_s", observed([1.0] * 9))])
    Producer("generator-1").send(ingest, [("rollout/duration_s", observed([11.0]))])
    at_s = NOW_S + 5
    assert await vector(fresh, "avg(headrace_rollout_duration_s)", at_s) == {"": 6.0}
    assert await vector(fresh, "headrace_pooled_rollout_duration_s", at_s) == {"": 2.0}


async def test_absent_values_have_no_sample(fresh: Ask, ingest: Ingest) -> None:
    producer = Producer("trainer-0")
    for bucket, value in enumerate((1.0, NAN, 3.0)):
        producer.send(ingest, [("loss", observed([value]))], now_s=NOW_S + 10 * bucket + 9)
    assert await vector(fresh, "count_over_time(headrace_loss[1m])", NOW_S + 30) == {"trainer-0": 2}
    assert await vector(fresh, "headrace_loss", NOW_S + 20) == {"trainer-0": 1}


async def test_scalars(promql: Ask) -> None:
    # What Grafana asks when a data source is tested.
    assert await promql("query", query="1+1", time=4) == {
        "resultType": "scalar",
        "result": [4, "2"],
    }
    assert (await promql("query", query="-1/0", time=1.5))["result"] == [1.5, "-Inf"]
    assert (await promql("query", query="0/0"))["result"] == [END_S, "NaN"]
    data = await promql("query_range", query="2", start=0, end=2, step=1)
    assert data["result"] == [{"metric": {}, "values": [[0, "2"], [1, "2"], [2, "2"]]}]


async def test_labels_and_series(promql: Ask) -> None:
    assert await promql("labels") == ["__name__", "lag", "producer", "run", "tool"]
    assert await promql("labels", match="headrace_loss") == ["__name__", "producer", "run"]
    assert await promql("label/run/values") == ["demo", "tools"]
    assert await promql("label/run/values", match=TOKENS) == ["demo"]
    generators = [f"generator-{n}" for n in range(4)]
    assert await promql("label/producer/values") == ["aggregator", *generators, "trainer-0"]
    assert await promql("label/producer/values", match=TOKENS) == generators
    assert await promql("label/tool/values") == ["add", "sub"]
    assert await promql("label/nothing/values") == []
    names = await promql("label/__name__/values", match='{run="tools",__name__=~".*tools.*"}')
    assert names == ["headrace_tools_call_total"]
    assert await promql("series", match=["headrace_loss", 'headrace_tools_call_total{tool="add"}'])
    assert await promql("series", match=f'{TOKENS}{{producer="generator-2"}}') == [
        {"__name__": TOKENS, "run": "demo", "producer": "generator-2"}
    ]
    assert await promql("series", match=TOKENS, end=NOW_S - 100) == []
    assert await promql("series", match=TOKENS, start=END_S + 1000) == []


async def test_metadata_and_build(promql: Ask) -> None:
    data = await promql("metadata", metric="headrace_loss")
    (about,) = data["headrace_loss"]
    assert about["type"] == "gauge"
    assert about["help"].startswith("The optimised value of the whole step")
    assert len(await promql("metadata")) > 100
    assert (await promql("status/buildinfo"))["version"] == "2.42.0"


@pytest.mark.parametrize(
    ("path", "parameters", "error_type", "says"),
    [
        ("query", {}, "bad_data", "query: is missing"),
        ("query", {"query": "rate("}, "bad_data", "query: "),
        ("query", {"query": "nonsense(1)"}, "bad_data", "unknown function"),
        ("query", {"query": "1", "time": "soon"}, "bad_data", "time: 'soon' is no time"),
        ("query", {"query": "1", "time": "nan"}, "bad_data", "out of range"),
        ("query", {"query": "1" * (MAX_SYNTAX + 1)}, "bad_data", "characters, or 1000 beside"),
        ("query", {"query": "(" * 101 + "1" + ")" * 101}, "execution", "nested more than 100"),
        ("query", {"query": "topk(3, x)"}, "execution", "the aggregation topk is not supported"),
        ("query", {"query": "irate(x[1m])"}, "execution", "the function irate is not supported"),
        ("query", {"query": "x > 1"}, "execution", "the operator > is not supported here: answer"),
        ("query", {"query": "x and y"}, "execution", "the operator and"),
        ("query", {"query": "x / on (run) y"}, "execution", "on, ignoring"),
        ("query", {"query": "x + on (run) group_left () y"}, "execution", "group_left"),
        ("query", {"query": "x[1m]"}, "execution", "a range outside a function"),
        ("query", {"query": "rate(x[5m:1m])"}, "execution", "rate of anything but a selector"),
        ("query", {"query": "x[5m:1m]"}, "execution", "a subquery"),
        ("query", {"query": "x @ 10"}, "execution", "the modifier @"),
        ("query", {"query": '"x"'}, "execution", "a text"),
        ("query", {"query": "x offset inf"}, "bad_data", "query: "),
        ("query", {"query": "x offset 101y"}, "bad_data", "offset: more than 36500 days"),
        ("query", {"query": "rate(x[101y])"}, "bad_data", "range: more than 36500 days"),
        ("query", {"query": "rate(x[9999999999y])"}, "bad_data", ""),
        ("query", {"query": '{run=~"(?=a)"}'}, "bad_data", "illegal regex"),
        ("query", {"query": f'{{run=~"{"a" * 4001}"}}'}, "bad_data", "of more than 4000"),
        ("query", {"query": '{a="1" or b="2"}'}, "execution", "or between matchers"),
        ("query", {"query": "rate(headrace_loss[1m])"}, "execution", "headrace_loss is a gauge"),
        (
            "query",
            {"query": f"avg_over_time({TWO_NAMES}[1m])"},
            "execution",
            "several series of the answer have the same labels",
        ),
        (
            "query",
            {"query": f"headrace_rollout_duration_s / {TWO_NAMES}"},
            "execution",
            "one side of an operation has several series",
        ),
        ("query_range", {"query": "1", "start": "0", "end": "1"}, "bad_data", "step: is missing"),
        ("query_range", {"query": "1", "start": "0", "step": "1"}, "bad_data", "end: is missing"),
        (
            "query_range",
            {"query": "1", "start": "2", "end": "1", "step": "1"},
            "bad_data",
            "end: is before start",
        ),
        (
            "query_range",
            {"query": "1", "start": "0", "end": "1", "step": "0"},
            "bad_data",
            "step: must be above 0",
        ),
        (
            "query_range",
            {"query": "1", "start": "0", "end": "11000", "step": "1s"},
            "bad_data",
            "more than 11,000 points",
        ),
        (
            "query_range",
            {"query": "1", "start": "0", "end": "1", "step": "soon"},
            "bad_data",
            "no duration such as 15s",
        ),
        ("series", {}, "bad_data", "match[]: is missing"),
        ("series", {"match[]": "1+1"}, "bad_data", "not a series selector"),
        ("labels", {"match[]": "rate(x[1m])"}, "bad_data", "not a series selector"),
        ("label/run/values", {"match[]": "x{"}, "bad_data", "query: "),
    ],
)
async def test_what_is_not_answered_is_422_and_says_why(
    filled: FastAPI, path: str, parameters: dict[str, str], error_type: str, says: str
) -> None:
    async with client_of(filled) as client:
        response = await client.post(f"{API}/{path}", data=parameters)
    assert response.status_code == 422, response.text
    answer = response.json()
    assert (answer["status"], answer["errorType"]) == ("error", error_type)
    assert says in answer["error"]


async def test_a_body_that_is_no_form_is_422(client: httpx.AsyncClient) -> None:
    async def refused(**sent: Any) -> str:
        response = await client.post(f"{API}/query", **sent)
        assert response.status_code == 422, response.text
        said: str = response.json()["error"]
        return said

    assert "Content-Type" in await refused(json={"query": "1"})
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    assert "no form" in await refused(content=b"query=\xff%ff", headers=form)
    assert "65536 bytes" in await refused(content=b"a" * 70_000, headers=form)


async def test_coarse_buckets_give_the_same_rates(promql: Ask) -> None:
    """At a step of a minute buckets of a minute are read, at 15 s those of 10 s."""
    fleet = f"sum(rate({TOKENS}[5m]))"
    window = {"start": NOW_S + 300, "end": END_S}
    fine = await promql("query_range", query=fleet, step=15, **window)
    coarse = await promql("query_range", query=fleet, step=60, **window)
    by_time = dict(fine["result"][0]["values"])
    for x, value in coarse["result"][0]["values"]:
        assert float(value) == pytest.approx(float(by_time[x]), rel=1e-6)


async def test_the_number_of_samples_does_not_depend_on_the_step(promql: Ask) -> None:
    query = "count_over_time(headrace_loss[5m])"
    for step in (15, 60, 300):
        data = await promql("query_range", query=query, start=NOW_S + 300, end=END_S, step=step)
        (series,) = data["result"]
        assert {value for _, value in series["values"]} == {"30"}
