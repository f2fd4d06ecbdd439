import json
from pathlib import Path

from services.launcher.logtail import TAIL_BYTES, last_error, user_error


def log(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "trainer-0.log"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_traceback_gives_its_last_line(tmp_path: Path) -> None:
    path = log(
        tmp_path,
        "INFO loading",
        "Traceback (most recent call last):",
        '  File "x.py", line 1, in <module>',
        "vllm.exceptions.EngineDeadError: the core is gone",
        "[rank0]: shutting down",
    )
    assert last_error(path) == "vllm.exceptions.EngineDeadError: the core is gone"


def test_a_json_line_gives_its_event_and_the_end_of_its_exception(tmp_path: Path) -> None:
    entry = {
        "event": "failed",
        "level": "error",
        "exception": "Traceback (most recent call last):\n  File x\nValueError: no rows\n",
    }
    path = log(tmp_path, json.dumps(entry), json.dumps({"event": "bye", "level": "info"}))
    assert last_error(path) == "failed: ValueError: no rows"


def test_what_a_dying_interpreter_says_does_not_hide_why_it_died(tmp_path: Path) -> None:
    failed = {"event": "failed", "level": "error", "exception": "ValueError: no rows"}
    rejected = {"event": "metric rejected", "level": "error", "key": "x"}
    lines = [json.dumps(failed), "RuntimeError: Event loop is closed", json.dumps(rejected)]
    assert last_error(log(tmp_path, *lines)) == "failed: ValueError: no rows"
    assert last_error(log(tmp_path, *lines[1:])) == "RuntimeError: Event loop is closed"
    assert last_error(log(tmp_path, *lines[2:], "bye")) == "metric rejected"


def test_without_an_error_the_last_line_says_it(tmp_path: Path) -> None:
    assert last_error(log(tmp_path, "one", "Killed", "")) == "Killed"
    assert last_error(tmp_path / "absent.log") == ""


def test_only_the_present_process_is_looked_at(tmp_path: Path) -> None:
    path = log(tmp_path, "error: an old mistake")
    since = path.stat().st_size
    with path.open("a") as file:
        file.write("started\n")
    assert user_error(path, since_byte=since) is None
    assert last_error(path, since_byte=since) == "started"
    assert user_error(path) == "an old mistake"


def test_the_end_of_a_long_log_is_enough(tmp_path: Path) -> None:
    path = log(tmp_path, *["x" * 99] * (TAIL_BYTES // 50), "error: data.file: there is no file y")
    assert user_error(path) == "data.file: there is no file y"
