"""/metrics, and the names that keys have there."""

import asyncio
import re
import shutil
import subprocess
from pathlib import Path

import grpc
import httpx
import pytest

from services.aggregator import exposition
from services.aggregator.api.app import create_app
from services.aggregator.api.backend import Backend
from services.aggregator.catalogue import CATALOGUE
from services.aggregator.exposition import Exposed, Sample
from services.aggregator.ingest import Ingest
from services.aggregator.metric import ALL, Catalogue, Metric
from services.aggregator.promql.names import Names
from services.common.tokens import Tokens
from tests.services.aggregator.making import INF, NAN, NOW_S, Producer, count, observed, ratio
from tests.services.aggregator.test_service import serving

NAMES = Names(CATALOGUE)


def declared(key: str) -> Metric:
    return Metric(key, "count", "calls", "sum", ALL, "A test's.")


async def scraped(client: httpx.AsyncClient) -> str:
    response = await client.get("/metrics")
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return response.text


def values(text: str, name: str) -> dict[str, str]:
    """By its labels, each value of a family."""
    found = re.findall(rf"^{name}(\{{.*\}})? (\S+)$", text, flags=re.MULTILINE)
    return {labels[1:-1]: value for labels, value in found}


def test_names_are_unique_and_valid_over_the_whole_catalogue() -> None:
    names = [family.name for family in NAMES.families]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"headrace_[a-zA-Z0-9_]+", name) for name in names)
    assert not any(name.startswith("headrace_aggregator_") for name in names)
    for metric in CATALOGUE.metrics:
        (own, *pooled) = NAMES.of(metric.key_for("x"), instrument=metric.instrument)
        assert own.family.type == ("counter" if metric.instrument == "count" else "gauge")
        assert own.family.name.endswith("_total") == (metric.instrument == "count")
        assert metric.meaning in own.family.help
        assert len(pooled) == (metric.instrument != "count")


@pytest.mark.parametrize(
    ("key", "instrument", "name", "labels"),
    [
        ("loss", "observation", "headrace_loss", {}),
        ("tools/get_max/call_total", "count", "headrace_tools_call_total", {"tool": "get_max"}),
        ("rollout/score_block_s", "count", "headrace_rollout_score_block_s_total", {}),
        # What would have another key's name says what its label is.
        ("kl", "ratio", "headrace_kl", {}),
        ("kl/3+", "ratio", "headrace_kl_by_lag", {"lag": "3+"}),
        ("rollout/failed_total", "count", "headrace_rollout_failed_total", {}),
        ("rollout/failed/x", "count", "headrace_rollout_failed_by_reason_total", {"reason": "x"}),
        ("tools/latency_s", "observation", "headrace_tools_latency_s", {}),
        ("tools/add/latency_s", "observation", "headrace_tools_latency_s_by_tool", {"tool": "add"}),
        # Custom keys that a name could not tell apart.
        ("custom/a/b", "count", "headrace_custom_total", {"name": "a/b"}),
        ("custom/a_b", "count", "headrace_custom_total", {"name": "a_b"}),
        ("custom/a_b", "ratio", "headrace_custom", {"name": "a_b"}),
    ],
)
def test_a_key_has_a_name_and_its_placeholder_a_label(
    key: str, instrument: str, name: str, labels: dict[str, str]
) -> None:
    named = NAMES.of(key, instrument=instrument)[0]  # type: ignore[arg-type]
    assert (named.family.name, dict(named.labels)) == (name, labels)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (("a/b", "a_b"), "a_b: headrace_a_b_total is the name of a/b"),
        (("aggregator/up",), "the aggregator itself"),
        (("a/{run}",), "{run} cannot be a label"),
    ],
)
def test_a_catalogue_whose_names_collide_is_refused(keys: tuple[str, ...], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        Names(Catalogue(declared(key) for key in keys))


def test_declared_custom_keys_cannot_collide() -> None:
    keys = ("custom/a.b", "custom/a_b")
    names = Names(Catalogue(declared(key) for key in keys))
    assert [names.of(key, instrument="count")[0].labels["name"] for key in keys] == ["a.b", "a_b"]


def test_the_text_is_escaped() -> None:
    family = Exposed(
        "a",
        "gauge",
        "Two\nlines and a \\.",
        (
            Sample({"b": 'say "c\\d"\n', "a": "é"}, 2.5),
            Sample({}, INF),
            Sample({"x": ""}, 4000.0),
            Sample({"x": "y"}, 1e-7),
        ),
    )
    assert exposition.render([family, Exposed("none", "counter", "Nothing.", ())]) == (
        "# HELP a Two\\nlines and a \\\\.\n"
        "# TYPE a gauge\n"
        'a{a="é",b="say \\"c\\\\d\\"\\n"} 2.5\n'
        "a +Inf\n"
        'a{x=""} 4000\n'
        'a{x="y"} 1e-07\n'
    )


@pytest.fixture
def recent(ingest: Ingest) -> None:
    """A run with every instrument, heard of just now."""
    trainer, generators = Producer("trainer-0"), [Producer(f"generator-{n}") for n in (0, 1)]
    trainer.send(ingest, [("loss", observed([1.0, 3.0])), ("kl/3+", ratio(1, 4))], step=1)
    trainer.send(ingest, [("kl", ratio(0, 0)), ("grad_norm", observed([NAN]))], step=1)
    for step in (1, 2):
        for generator in generators:
            generator.send(
                ingest,
                [
                    ("rollout/generated_tok_s", count(1000)),
                    ('tools/say"hi"/call_total', count(2)),
                    ("rollout/inflight", observed([3.0])),
                ],
                step=step,
                now_s=NOW_S + 10 * step,
            )


@pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)
@pytest.mark.usefixtures("recent")
async def test_latest_values_and_totals_are_exposed(backend: Backend) -> None:
    text = await scraped(client_at(backend, NOW_S + 30))
    run = 'run="demo"'
    assert values(text, "headrace_loss") == {run: "2"}
    assert values(text, "headrace_kl_by_lag") == {f'lag="3+",{run}': "0.25"}
    # A rate is Prometheus' to take: here is the total of both generators and both steps.
    assert values(text, "headrace_rollout_generated_tok_s_total") == {run: "4000"}
    assert values(text, "headrace_tools_call_total") == {f'{run},tool="say\\"hi\\""': "8"}
    assert values(text, "headrace_rollout_inflight") == {run: "6"}
    # Absent values are left out, and so are their families; NaN is no value.
    assert "headrace_kl{" not in text
    assert "headrace_kl " not in text
    assert "grad_norm" not in text
    assert "NaN" not in text
    assert "# TYPE headrace_loss gauge" in text
    assert "# TYPE headrace_rollout_generated_tok_s_total counter" in text
    assert "# HELP headrace_loss The optimised value of the whole step" in text


@pytest.mark.usefixtures("recent")
async def test_runs_that_fell_silent_are_left_out(backend: Backend) -> None:
    for later_s, exposed in ((86_000, "1"), (87_000, "0")):
        text = await scraped(client_at(backend, NOW_S + 20 + later_s))
        assert values(text, "headrace_aggregator_exposed_runs") == {"": exposed}
        assert ("headrace_loss" in text) == (exposed == "1")


@pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)
async def test_its_own_health_is_exposed(backend: Backend, ingest: Ingest) -> None:
    client = client_at(backend, NOW_S + 30)
    text = await scraped(client)
    assert values(text, "headrace_aggregator_up") == {"": "1"}
    assert values(text, "headrace_aggregator_last_batch_age_seconds") == {}
    assert values(text, "headrace_aggregator_batches_total") == {
        f'outcome="{each}"': "0" for each in ("taken", "duplicate", "refused", "failed")
    }
    Producer("p").send(ingest, [("loss", observed([1.0]))], sequence=3)
    backend.intake.took(duplicate=False, accepted=7, rejected=2, commit_s=0.5, now_s=NOW_S + 28)
    backend.intake.took(duplicate=True, accepted=0, rejected=0, commit_s=0.25, now_s=NOW_S + 28)
    backend.intake.missed("failed")
    text = await scraped(client)
    outcomes = values(text, "headrace_aggregator_batches_total")
    assert outcomes['outcome="taken"'] == outcomes['outcome="duplicate"'] == "1"
    assert outcomes['outcome="failed"'] == "1"
    assert values(text, "headrace_aggregator_deltas_total") == {
        'outcome="accepted"': "7",
        'outcome="rejected"': "2",
    }
    assert values(text, "headrace_aggregator_commit_seconds_sum") == {"": "0.75"}
    assert values(text, "headrace_aggregator_commit_seconds_count") == {"": "2"}
    assert values(text, "headrace_aggregator_last_batch_age_seconds") == {"": "2"}
    assert values(text, "headrace_aggregator_missing_batches") == {'run="demo"': "2"}
    (size,) = values(text, "headrace_aggregator_store_bytes").values()
    assert int(size) > 4096


async def test_batches_are_counted_as_they_are_answered(tmp_path: Path) -> None:
    producer = Producer("p")
    request = producer.request([("loss", observed([1.0])), ("lose", observed([1.0]))])
    nameless = producer.request()
    nameless.boot_id = ""
    async with serving(tmp_path) as aggregator:
        await aggregator.push(request)
        await aggregator.push(request)
        with pytest.raises(grpc.RpcError):
            await aggregator.push(nameless)
        text = (await aggregator.ask("/metrics")).text
    assert values(text, "headrace_aggregator_batches_total") == {
        'outcome="taken"': "1",
        'outcome="duplicate"': "1",
        'outcome="refused"': "1",
        'outcome="failed"': "0",
    }
    assert values(text, "headrace_aggregator_deltas_total") == {
        'outcome="accepted"': "1",
        'outcome="rejected"': "1",
    }
    (age_s,) = values(text, "headrace_aggregator_last_batch_age_seconds").values()
    assert 0 <= float(age_s) < 60


async def test_it_needs_the_token_where_there_is_one(backend: Backend) -> None:
    transport = httpx.ASGITransport(create_app(backend, tokens=Tokens("s3cret")))
    async with httpx.AsyncClient(transport=transport, base_url="http://aggregator") as client:
        for path in ("/metrics", "/prometheus/api/v1/query?query=1"):
            assert (await client.get(path)).status_code == 401
            headers = {"Authorization": "Bearer s3cret"}
            assert (await client.get(path, headers=headers)).status_code == 200


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian's prometheus)")
@pytest.mark.usefixtures("recent")
async def test_promtool_reads_it(backend: Backend) -> None:
    text = await scraped(client_at(backend, NOW_S + 30))
    checked = await asyncio.to_thread(
        subprocess.run,
        ["promtool", "check", "metrics"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    said = (checked.stdout + checked.stderr).splitlines()
    # 3: it reads everything, and remarks on style: our keys have their units as `_s`.
    assert checked.returncode in (0, 3), said
    assert [line for line in said if "abbreviated units" not in line] == []


def client_at(backend: Backend, now_s: float) -> httpx.AsyncClient:
    """The application, at a time of the test's."""
    transport = httpx.ASGITransport(create_app(backend, clock=lambda: now_s))
    return httpx.AsyncClient(transport=transport, base_url="http://aggregator")
