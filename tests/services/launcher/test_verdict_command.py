"""`headrace verdict` against the real REST application on loopback."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fastapi import FastAPI

from services.aggregator.api.app import create_app
from services.aggregator.api.backend import Backend
from services.aggregator.catalogue import CATALOGUE
from services.aggregator.ingest import Ingest
from services.aggregator.store import Store
from services.common.errors import UserError
from services.common.tokens import Tokens
from services.launcher import ports
from services.launcher.errors import RunFailed
from tests.services.aggregator.making import Producer, observed, ratio
from tests.services.aggregator.test_evidence import record
from tests.services.launcher.serving import headrace, serve


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    """A store that knows of 30 steps of the run demo, and of the first of two others."""
    store = Store.open(f"sqlite:///{tmp_path_factory.mktemp('store') / 'metrics.sqlite'}")
    ingest = Ingest(store)
    begun, sick = Producer("trainer-0", run="begun"), Producer("scorer-0", run="sick")
    begun.send(ingest, [("loss", observed([0.5]))], step=1)
    sick.send(ingest, [("reward/zero_std_frac", ratio(9, 10))], step=1)
    record(ingest, range(1, 31))
    with ThreadPoolExecutor(1) as writer:
        yield Backend(store, CATALOGUE, writer)
    store.close()


@pytest.fixture(scope="module")
def url(backend: Backend) -> Iterator[str]:
    yield from serve(create_app(backend))


@pytest.fixture(scope="module")
def guarded_url(backend: Backend) -> Iterator[str]:
    yield from serve(create_app(backend, tokens=Tokens("s3cret")))


def ask(*arguments: str) -> str:
    """What the command prints; its errors are raised."""
    return headrace("verdict", *arguments)


def test_it_prints_the_sentence_the_knob_and_the_evidence(url: str) -> None:
    lines = ask(url, "demo").splitlines()
    assert lines[0] == (
        "generation-bound: the trainer waits 61 % of each step (1.9 of 3.1 s); with generation for "
        "free a step would take 1.2 s"
    )
    assert lines[1].startswith("next: more generators (generator.replicas;")
    assert lines[2] == (
        "confidence high · steps 11 to 30 · a step needs: training 1.2 s, generation 3 s, "
        "scoring 0.31 s"
    )
    assert lines[3].split() == ["evidence", "value", "wanted", "holds"]
    wait = next(line for line in lines if line.startswith("perf/rollout_wait_s"))
    assert wait.split()[-4:] == ["0.613", ">=", "0.1", "yes"]
    assert len(lines) == 8


def test_window_and_speed_up_are_passed_on(url: str) -> None:
    shown = ask(url + "/", "demo", "--window", "5", "--speed-up", "2")
    assert "2 times as fast, 1.6 s\n" in shown
    assert "confidence medium · steps 26 to 30" in shown


def test_the_history_is_a_line_for_each_window(url: str) -> None:
    assert [
        line.split() for line in ask(url, "demo", "--history", "--window", "10").splitlines()
    ] == [
        ["steps", "verdict", "share", "confidence", "s/step"],
        ["2-9", "generation-bound", "61", "%", "medium", "3.1"],
        ["10-19", "generation-bound", "61", "%", "medium", "3.1"],
        ["20-29", "generation-bound", "61", "%", "medium", "3.1"],
        ["30-30", "not", "enough", "data", "—", "—", "—"],
    ]
    assert len(ask(url, "demo", "--history", "--window", "1").splitlines()) == 30
    assert ask(url, "begun", "--history") == "no steps yet\n"
    with pytest.raises(UserError, match="--speed-up: what has been is not predicted"):
        ask(url, "demo", "--history", "--speed-up", "2")


def test_faults_are_said_with_what_to_do_and_their_numbers(url: str) -> None:
    lines = ask(url, "sick").splitlines()
    assert lines[-3:] == [
        "fault: 90 % of the groups teach nothing: all conversations of a group got the same reward",
        "  next: other prompts, neither too easy nor too hard (the recipe's [data]), more "
        "conversations in a group (generation.num_generations), or a reward with finer steps "
        "(rewards.functions)",
        "  found: reward/zero_std_frac 0.9 >= 0.8",
    ]
    assert not any(line.startswith("fault") for line in ask(url, "demo").splitlines())


def test_a_token_comes_from_a_file(guarded_url: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    assert "generation-bound" in ask(guarded_url, "demo", "--token-file", str(token))
    token.write_text("wrong\n")
    for given in ((), ("--token-file", str(token))):
        with pytest.raises(UserError, match="--token-file") as refused:
            ask(guarded_url, "demo", *given)
        assert "wrong" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [(None, "cannot be read"), ("", "is empty"), ("a b", "blank")],
)
def test_a_token_file_without_a_token(
    url: str, tmp_path: Path, text: str | None, says: str
) -> None:
    token = tmp_path / "token"
    if text is not None:
        token.write_text(text)
    with pytest.raises(UserError, match=f"--token-file: .*{says}"):
        ask(url, "demo", "--token-file", str(token))


@pytest.mark.parametrize(
    ("run", "options", "says"),
    [
        ("none", (), "refuses: no run 'none'; runs here: "),
        ("a/b", (), "refuses: "),
        ("demo", ("--window", "0"), "refuses: window: "),
        ("demo", ("--speed-up", "0.1"), "refuses: speed_up: "),
    ],
)
def test_what_the_aggregator_refuses_is_a_mistake(
    url: str, run: str, options: tuple[str, ...], says: str
) -> None:
    with pytest.raises(UserError) as refused:
        ask(url, run, *options)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("wrong", ["localhost:8080", "demo", "ftp://host", "http://", "http://a:b"])
def test_an_address_that_is_none(wrong: str) -> None:
    with pytest.raises(UserError, match="write it as http://localhost:8080"):
        ask(wrong, "demo")


def test_nobody_answers() -> None:
    (port,) = ports.choose(1, host="127.0.0.1")
    with pytest.raises(UserError, match=f"no aggregator answers at http://127.0.0.1:{port}"):
        ask(f"http://127.0.0.1:{port}", "demo")


def test_somebody_else_answers() -> None:
    other = FastAPI(openapi_url=None)

    @other.get("/api/v1/runs/{run}/verdict")
    def answer(run: str) -> object:
        return {"list": ["text"], "dict": {"verdict": "x"}}[run]

    for url in serve(other):
        with pytest.raises(UserError, match="is no aggregator"):
            ask(url, "list")
        with pytest.raises(UserError, match="in another form than this release reads"):
            ask(url, "dict")


def test_an_aggregator_that_cannot_read_its_store_has_failed(tmp_path: Path) -> None:
    store = Store.open(f"sqlite:///{tmp_path / 'metrics.sqlite'}")
    with store.engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE runs")
    with ThreadPoolExecutor(1) as writer:
        for url in serve(create_app(Backend(store, CATALOGUE, writer))):
            with pytest.raises(RunFailed, match="the store failed"):
                ask(url, "demo")
    store.close()
