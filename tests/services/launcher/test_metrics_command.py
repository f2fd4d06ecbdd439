"""`headrace metrics` against the real REST application on loopback."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from services.aggregator.api.app import create_app
from services.aggregator.api.backend import Backend
from services.aggregator.catalogue import CATALOGUE
from services.aggregator.ingest import Ingest
from services.aggregator.store import Store
from services.common.errors import UserError
from tests.services.aggregator.making import INF, NAN, NOW_S, Producer, count, observed, ratio
from tests.services.launcher.serving import headrace, on_a_terminal, serve

STEPS = range(1, 41)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Forty steps of 10 s: a trainer, and two generators of which one joins at step 21."""
    store = Store.open(f"sqlite:///{tmp_path_factory.mktemp('store') / 'metrics.sqlite'}")
    ingest = Ingest(store)
    trainer = Producer("trainer-0")
    generators = [Producer(f"generator-{n}", service="generator") for n in range(2)]
    for step in STEPS:
        at = {"step": step, "now_s": NOW_S + 10 * step}
        measured = [
            ("loss", observed([NAN if step == 40 else step / 1000])),
            ("grad_norm", observed([INF])),
            ("learning_rate", observed([1e-6])),
            ("perf/step_s", observed([10.0])),
            ("kl", ratio(step, 1000)),
            ("kl/1", ratio(0, 0)),
            ("sample/dropped_stale_total", count(4912)),
        ]
        trainer.send(ingest, measured, **at)
        for number, generator in enumerate(generators):
            if number == 0 or step > 20:
                generator.send(ingest, [("rollout/duration_s", observed([1.0 + number]))], **at)
    with ThreadPoolExecutor(1) as writer:
        yield from serve(create_app(Backend(store, CATALOGUE, writer)))
    store.close()


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_all_metrics_by_family_with_units(url: str) -> None:
    titles, *lines = headrace("metrics", url, "demo").splitlines()
    assert cells(titles) == ["metric", "value", "unit", "step", "reduction"]
    blocks = [block.splitlines() for block in "\n".join(lines).split("\n\n")]
    keys = [[line.split(" ")[0] for line in block] for block in blocks]
    assert ["kl", "kl/1"] in keys
    assert keys[0] == sorted(keys[0])
    assert {"loss", "perf/step_s", "rollout/duration_s"} <= set(keys[0])
    shown = {line.split(" ")[0]: cells(line)[1:] for block in blocks for line in block}
    assert shown["perf/step_s"] == ["10", "s", "40", "mean"]
    assert shown["sample/dropped_stale_total"] == ["4.91k", "samples", "40", "sum"]
    assert shown["learning_rate"][:1] == ["1.0e-06"]
    assert shown["rollout/duration_s"] == ["1.5", "s", "40", "mean"]


def test_absent_not_a_number_and_infinite_are_told_apart(url: str) -> None:
    lines = headrace("metrics", url, "demo", "--match", "^(loss|grad_norm|kl/1)$").splitlines()
    values = {line.split(" ")[0]: cells(line)[1] for line in lines if line}
    del values["metric"]
    assert values == {"loss": "NaN", "grad_norm": "inf", "kl/1": "—"}


def test_piped_output_has_no_colours_and_no_spaces_at_line_ends(url: str) -> None:
    for shown in (headrace("metrics", url, "demo"), headrace("metrics", url, "demo", "kl")):
        assert "\x1b" not in shown
        assert all(line == line.rstrip() for line in shown.splitlines())


def test_the_history_of_a_key(url: str) -> None:
    title, titles, line = headrace("metrics", url, "demo", "kl").splitlines()
    assert title == "kl  ratio, nats  steps 1 to 40"
    assert cells(titles) == ["first", "last", "min", "max", "last step"]
    history, *numbers = cells(line)
    assert len(history) == 40
    assert (history[0], history[-1]) == ("▁", "█")
    assert numbers == ["0.001", "0.04", "0.001", "0.04", "40"]


def test_several_keys_are_a_block_each(url: str) -> None:
    blocks = headrace("metrics", url, "demo", "kl", "loss", "kl/1").split("\n\n")
    assert [block.split(" ")[0] for block in blocks] == ["kl", "loss", "kl/1"]
    assert cells(blocks[1].splitlines()[-1])[1:] == ["0.001", "NaN", "0.001", "0.039", "40"]
    assert cells(blocks[2].splitlines()[-1]) == ["—", "—", "—", "—", "40"]


def test_each_producer_has_a_line_under_the_same_steps(url: str) -> None:
    shown = headrace("metrics", url, "demo", "rollout/duration_s", "--by-producer")
    _, titles, *lines = shown.splitlines()
    assert [line.split(" ")[0] for line in lines] == ["all", "generator-0", "generator-1"]
    begin = lines[0].index("▁")
    assert lines[2][begin : begin + 40] == " " * 20 + "▄" * 20
    assert cells(lines[0])[2:] == ["1", "1.5", "1", "1.5", "40"]
    assert cells(lines[2])[2:] == ["2", "2", "2", "2", "40"]
    assert titles.startswith(" " * begin)


def test_parts_of_a_history(url: str) -> None:
    def title(*options: str) -> str:
        return headrace("metrics", url, "demo", "kl", *options).splitlines()[0]

    assert title("--last", "5") == "kl  ratio, nats  steps 36 to 40"
    assert title("--since", "3", "--until", "9") == "kl  ratio, nats  steps 3 to 8"
    assert title("--since", "100") == "kl  ratio, nats  no points"
    shown = headrace("metrics", url, "demo", "rollout/duration_s", "--reduce", "max")
    assert shown.splitlines()[0] == "rollout/duration_s  max, s  steps 1 to 40"


def test_by_time(url: str) -> None:
    shown = headrace("metrics", url, "demo", "kl", "--axis", "time", "--last", "60")
    title, titles, line = shown.splitlines()
    assert title.startswith("kl  ratio, nats  ")
    assert title.endswith(", a point is 10 s")
    assert cells(titles)[-1] == "last seen"
    assert cells(line)[1:3] == ["0.034", "0.04"]


def test_a_window_of_several_steps_says_so_and_keeps_the_extremes(tmp_path: Path) -> None:
    store = Store.open(f"sqlite:///{tmp_path / 'metrics.sqlite'}")
    ingest, producer = Ingest(store), Producer("p")
    for step, value in ((1, 1.0), (2, 9.0), (20_000, 4.0)):
        producer.send(ingest, [("loss", observed([value]))], step=step)
    with ThreadPoolExecutor(1) as writer:
        for url in serve(create_app(Backend(store, CATALOGUE, writer))):
            answer = httpx.get(f"{url}/api/v1/runs/demo/metrics/loss?max_points=10000").json()
            title, _, line = headrace("metrics", url, "demo", "loss").splitlines()
    store.close()
    width = answer["width"]
    assert width > 1
    assert title.endswith(f", a point is {width} steps")
    assert cells(line)[-3:-1] == ["1", "9"]


def test_json_is_each_answer_as_it_is(url: str) -> None:
    assert headrace("metrics", url, "demo", "--json") == (
        httpx.get(f"{url}/api/v1/runs/demo/metrics").text + "\n"
    )
    first, second = headrace("metrics", url, "demo", "kl", "loss", "--json").splitlines()
    assert json.loads(first)["key"] == "kl"
    assert json.loads(second)["points"][-1] == {"x": 40, "value": None, "nan": 1}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("none",), "no run 'none'; runs here: demo"),
        (("demo", "iteration_time_s"), "iteration_time_s is called perf/step_s here"),
        (("demo", "kl", "perf/nothing"), "no metric 'perf/nothing'"),
        (("demo", "kl", "--reduce", "p95"), "choose one of ratio"),
        (("demo", "kl", "--axis", "wall"), "axis"),
        (("demo", "kl", "--since", "soon"), "since: 'soon' is not a step"),
        (("demo", "kl", "--since", "5", "--last", "3"), "--last: is itself a range"),
        (("demo", "kl", "--last", "0"), "--last: give a number"),
        (("demo", "kl", "--match", "l"), "--match: "),
        (("demo", "--match", "("), "not a regular expression"),
        (("demo", "--by-producer"), "--by-producer: is about the history of a KEY"),
        (("demo", "--last", "3"), "--last: is about the history of a KEY"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_printed(
    url: str, arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError) as refused:
        headrace("metrics", url, *arguments)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("columns", [60, 72])
def test_a_terminal_is_filled_and_not_exceeded(url: str, columns: int) -> None:
    status, lines = on_a_terminal(
        "metrics", url, "demo", "rollout/duration_s", "--by-producer", columns=columns
    )
    assert status == 0
    assert max(map(len, lines)) == columns
    assert len(lines) == 5


def test_keys_stay_whole_on_a_terminal(url: str) -> None:
    status, lines = on_a_terminal("metrics", url, "demo", columns=80)
    assert status == 0
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("sample/dropped_stale_total  ") for line in lines)


def test_help_has_examples() -> None:
    shown = " ".join(headrace("metrics", "--help").split())
    assert "headrace metrics http://localhost:8080 demo reward perf/step_s --last 100" in shown
    for command, rest in (("list", ""), ("delete", " demo --yes"), ("keep", " demo 30")):
        shown = " ".join(headrace("runs", command, "--help").split())
        assert f"headrace runs {command} http://localhost:8080{rest}" in shown
