"""`headrace dead-letters` on a real queue server."""

import json
from pathlib import Path

import pytest
import redis
from typer.testing import CliRunner

from services.common.config import Queue
from services.common.errors import UserError
from services.common.queue import SCRIPTS, Keys
from services.launcher import embedded_queue, ports
from services.launcher.cli import app
from tests.services.launcher.serving import headrace, on_a_terminal
from tests.services.scorer.groups import group_of

RECIPE = """
run = "demo"
[data]
file = "prompts.jsonl"
[trainer]
max_steps = 3
[rewards]
functions = [{function = "exact_match"}]
"""

GOOD = group_of("a", "b").SerializeToString()

LONG = "rewards: the function returned\nnumbers that nobody can read"


@pytest.fixture
def letters(valkey_url: str) -> list[str]:
    """Two refused groups of run `demo`: one that is no message, and a healthy one whose reward
    function broke. The trainer has not looked yet.
    """
    keys = Keys("demo")
    made = []
    with redis.Redis.from_url(valkey_url) as client:
        client.hset(keys.clock, mapping={"attempt": 1, "state": "running"})
        client.xgroup_create(keys.groups, "hr", id="0", mkstream=True)
        refuse = client.register_script(SCRIPTS["refuse"])
        for ordinal, (data, reason) in enumerate([(b"\xff\x00", "no message"), (GOOD, LONG)]):
            group = f"0.{ordinal}.1.0"
            client.hset(keys.outstanding, group, "groups:g:1|3|")
            client.xadd(keys.groups, {"id": group, "n": 2, "data": data})
            found = client.xreadgroup("hr", "s", {keys.groups: ">"})
            [(entry, _)] = (
                found[keys.groups.encode()][0] if isinstance(found, dict) else found[0][1]
            )
            names = [keys.groups, keys.dead, keys.samples, keys.outstanding, keys.clock]
            limits = (Queue().dead_max_entries, Queue().dead_max_bytes)
            call = ["s", entry, 1, group, reason, data, "groups", *limits, "1", "1", "groups:s:1"]
            assert refuse(keys=names, args=call) == b"done"
        for letter, _ in client.xrange(keys.dead):
            made.append(letter.decode())
    return made


def failing(*arguments: str) -> tuple[int, str]:
    """Exit status and what is printed, where there is no terminal."""
    done = CliRunner().invoke(app, arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout


def test_the_list(valkey_url: str, letters: list[str]) -> None:
    lines = headrace("dead-letters", "list", valkey_url, "--run", "demo").splitlines()
    cells = [[cell.strip() for cell in line.split("  ") if cell] for line in lines]
    titles = ["id", "group", "stream", "deliveries", "bytes", "buried", "reason"]
    assert cells[0] == titles
    assert [row[:5] for row in cells[1:]] == [
        [letters[0], "0.0.1.0", "groups", "1", "2"],
        [letters[1], "0.1.1.0", "groups", "1", f"{len(GOOD)}"],
    ]
    assert all(row[5].endswith("ago") for row in cells[1:])
    assert cells[2][6] == "rewards: the function returned numbers that nobody can read"


def test_the_list_for_scripts(valkey_url: str, letters: list[str]) -> None:
    told = json.loads(headrace("dead-letters", "list", valkey_url, "--run", "demo", "--json"))
    assert told["run"] == "demo"
    assert [each["letter_id"] for each in told["dead_letters"]] == letters
    assert told["dead_letters"][1]["reason"] == LONG


def test_a_run_without_dead_letters(valkey_url: str) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        client.hset("hr:{demo}:clock", "attempt", 1)
    printed = headrace("dead-letters", "list", valkey_url, "--run", "demo")
    assert printed == "run demo has no dead letters\n"


def test_an_entry_is_shown_as_json(valkey_url: str, letters: list[str]) -> None:
    printed = headrace("dead-letters", "show", valkey_url, letters[1], "--run", "demo")
    assert "group_id: 0.1.1.0" in printed.splitlines()
    assert '"group_id": "0.0.1.0"' in printed  # the message says another id: why it was refused
    as_json = headrace("dead-letters", "show", valkey_url, letters[1], "--run", "demo", "--json")
    assert len(json.loads(as_json)["message"]["rollouts"]) == 2


def test_an_entry_that_is_no_message_is_shown_in_hexadecimal(
    valkey_url: str, letters: list[str]
) -> None:
    printed = headrace("dead-letters", "show", valkey_url, letters[0], "--run", "demo")
    assert printed.splitlines()[-1] == "hex: ff00"


def test_an_entrys_bytes_go_to_a_file(valkey_url: str, letters: list[str], tmp_path: Path) -> None:
    raw = tmp_path / "entry.bin"
    arguments = ("dead-letters", "show", valkey_url, letters[1], "--run", "demo", "--raw")
    headrace(*arguments, str(raw))
    assert raw.read_bytes() == GOOD
    with pytest.raises(UserError, match=r"--raw: .* cannot be written"):
        headrace(*arguments, str(tmp_path / "nowhere" / "entry.bin"))


def test_requeue_and_what_is_too_late(valkey_url: str, letters: list[str]) -> None:
    first, second = letters
    keys = Keys("demo")
    with redis.Redis.from_url(valkey_url) as client:
        client.hdel(keys.outstanding, "0.0.1.0")  # the trainer has dropped it meanwhile
        status, printed = failing(
            "dead-letters", "requeue", valkey_url, first, second, "1-1", "--run", "demo"
        )
        lines = printed.splitlines()
        assert status == 1
        assert lines[0].startswith(f"not requeued {first}: the trainer has settled group 0.0.1.0")
        assert lines[1] == f"requeued {second}: it is back where it came from"
        assert lines[2] == "not requeued 1-1: there is no such letter"
        [(_, fields)] = client.xrange(keys.groups)
        assert fields[b"data"] == GOOD
        assert [letter for letter, _ in client.xrange(keys.dead)] == [first.encode()]


def test_all_are_generated_anew(valkey_url: str, letters: list[str]) -> None:
    arguments = ("dead-letters", "requeue", valkey_url, "--all", "--regenerate", "--run", "demo")
    told = json.loads(headrace(*arguments, "--json"))
    assert [each["outcome"] for each in told["dead_letters"]] == ["done", "done"]
    with redis.Redis.from_url(valkey_url) as client:
        told = [fields[b"reason"] for _, fields in client.xrange(Keys("demo").samples)]
    assert told == [b"requeued", b"requeued"]


def test_discarding_asks_on_a_terminal_and_needs_yes_elsewhere(
    valkey_url: str, letters: list[str]
) -> None:
    one = ("dead-letters", "discard", valkey_url, letters[0], "--run", "demo")
    with pytest.raises(UserError, match=r"--yes: there is no terminal.*nothing was discarded"):
        headrace(*one)
    status, lines = on_a_terminal(*one, columns=200, typed="n\n")
    assert status == 1
    assert lines[-1].endswith("nothing was discarded")
    status, lines = on_a_terminal(*one, columns=200, typed="y\n")
    assert status == 0
    assert lines[-1].endswith("discarded 1")
    everything = ("dead-letters", "discard", valkey_url, "--all", "--run", "demo", "--yes")
    assert headrace(*everything) == "discarded 1\n"
    assert headrace(*everything) == "discarded 0\n"
    status, printed = failing(*one, "--yes")
    assert status == 1
    assert printed.startswith(f"not discarded {letters[0]}: there is no such letter")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("list", "URL"), "--run: with a queue's URL the run's name is needed"),
        (("list", "http://localhost:1"), "QUEUE: http://localhost:1 is no queue's URL"),
        (("list", "URL", "--run", "other"), "--run: the queue server at .* knows no run 'other'"),
        (("show", "URL", "x", "--run", "demo"), "ID: 'x' is no id of a dead letter"),
        (("requeue", "URL", "--run", "demo"), "ID: name the dead letters, or say --all"),
        (("discard", "URL", "1-1", "--all", "--run", "demo"), "ID: name the dead letters"),
    ],
)
def test_mistakes(
    valkey_url: str, letters: list[str], arguments: tuple[str, ...], message: str
) -> None:
    assert letters
    given = [valkey_url if each == "URL" else each for each in arguments]
    with pytest.raises(UserError, match=message):
        headrace("dead-letters", *given)


def test_a_server_that_is_away_is_a_mistake() -> None:
    (port,) = ports.choose(1, host="127.0.0.1")
    with pytest.raises(UserError, match="no queue server answers at"):
        headrace("dead-letters", "list", f"redis://:secret@127.0.0.1:{port}/0", "--run", "demo")


def test_a_recipe_names_the_queue_and_the_run(
    valkey_url: str, letters: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE + f'[queue]\nurl = "{valkey_url}"\n')
    assert letters[0] in headrace("dead-letters", "list", str(recipe))
    with pytest.raises(UserError, match="knows no run 'other'"):
        headrace("dead-letters", "list", str(recipe), "--run", "other")

    # Without a URL it is the server that `headrace run` has started.
    monkeypatch.chdir(tmp_path)
    recipe.write_text(RECIPE)
    with pytest.raises(UserError, match="run demo has no queue server yet"):
        headrace("dead-letters", "list", str(recipe))
    folder = tmp_path / "runs" / "demo" / "queue"
    embedded_queue.write_config(folder, port=int(valkey_url.split(":")[2].split("/")[0]))
    assert letters[0] in headrace("dead-letters", "list", str(recipe))
    embedded_queue.write_config(folder, port=ports.choose(1, host="127.0.0.1")[0])
    with pytest.raises(UserError, match="the queue server of run demo does not run"):
        headrace("dead-letters", "list", str(recipe))
