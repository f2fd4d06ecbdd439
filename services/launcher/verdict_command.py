"""`headrace verdict`: asks an aggregator what holds a run back, and prints it."""

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
from rich.console import Console
from rich.table import Table

from services.common.errors import UserError
from services.launcher.errors import RunFailed
from services.launcher.figures import ABSENT, number, percent

TIMEOUT_S = 30.0
"""Of the query."""

EXAMPLE = "http://localhost:8080"


def show(
    url: str,
    *,
    run: str,
    window: int | None,
    speed_up: float | None,
    token_file: Path | None,
    console: Console,
) -> None:
    """Print the verdict on a run: the sentence, what to turn next, and the evidence.

    Raises UserError for an address, token, run or option that is not right, RunFailed when the
    aggregator cannot answer.
    """
    asked = {"window": window, "speed_up": speed_up}
    answer = _ask(
        _address(url),
        run=run,
        parameters={name: str(value) for name, value in asked.items() if value is not None},
        token=None if token_file is None else _read_token(token_file),
    )
    try:
        # soft_wrap: a sentence stays one line, also where it is piped to another program.
        for text in (answer["sentence"], f"next: {answer['knob']}", _rests_on(answer)):
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        if answer["missing"]:
            lacking = f"missing: {', '.join(answer['missing'])}"
            console.print(lacking, markup=False, highlight=False, soft_wrap=True)
        if answer["evidence"]:
            console.print(_evidence(answer["evidence"]))
    except (KeyError, TypeError) as error:
        raise UserError(
            f"URL: {url} answers in another form than this release reads ({error!r}); use the "
            "aggregator's release"
        ) from None


def _address(url: str) -> httpx.URL:
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise UserError(f"URL: {url} is no address ({error}); write it as {EXAMPLE}") from None
    if address.scheme not in ("http", "https") or not address.host:
        raise UserError(f"URL: {url} is no address of an aggregator; write it as {EXAMPLE}")
    return address


def _read_token(path: Path) -> str:
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--token-file: cannot be read: {error}") from None
    if not token or not token.isascii() or not token.isprintable():
        raise UserError(f"--token-file: {path} holds no token (one line of printable ASCII)")
    return token


def _ask(
    address: httpx.URL, *, run: str, parameters: Mapping[str, str], token: str | None
) -> dict[str, Any]:
    """The aggregator's answer."""
    path = f"{address.path.rstrip('/')}/api/v1/runs/{quote(run, safe='')}/verdict"
    target = address.copy_with(path=path, query=None, fragment=None)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    # On this machine a proxy of the environment must not come between.
    with httpx.Client(timeout=TIMEOUT_S, trust_env=not _is_here(address.host)) as client:
        try:
            response = client.get(target, params=dict(parameters), headers=headers)
        except httpx.HTTPError as error:
            cause = str(error) or type(error).__name__
            raise UserError(f"URL: no aggregator answers at {address} ({cause})") from None
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise UserError(
            f"URL: what answers at {address} is no aggregator (status {response.status_code})"
        )
    if response.is_success:
        return answer
    said = answer.get("detail", f"status {response.status_code}")
    if response.status_code == httpx.codes.UNAUTHORIZED:
        raise UserError(f"{address} wants another token ({said}); name its file with --token-file")
    if response.is_server_error:
        raise RunFailed(f"the aggregator at {address} cannot answer: {said}")
    raise UserError(f"{address} refuses: {said}")


def _is_here(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _rests_on(answer: Mapping[str, Any]) -> str:
    """Confidence, steps, and how much of a step is not explained."""
    parts = [f"confidence {answer['confidence']}"] if answer["confidence"] else []
    first, last, num_steps = answer["first_step"], answer["last_step"], answer["num_steps"]
    steps = f"steps {first} to {last}" if num_steps > 1 else f"step {first}"
    parts.append(steps if num_steps else "no steps")
    if answer["unaccounted_share"] is not None:
        parts.append(f"{percent(answer['unaccounted_share'])} of a step unaccounted for")
    stages = answer["stages"]
    if stages is not None:
        of_step = ", ".join(
            f"{name.removesuffix('_s')} {ABSENT if value is None else f'{number(value)} s'}"
            for name, value in stages.items()
        )
        parts.append(f"a step needs: {of_step}")
    return " · ".join(parts)


def _evidence(found: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("evidence", "", "value", "wanted", "holds"):
        table.add_column(title, justify="right" if title == "value" else "left")
    for each in found:
        table.add_row(
            each["key"],
            each["measure"],
            number(each["value"]),
            f"{each['compare']} {number(each['threshold'])}",
            ("yes" if each["holds"] else "no") if each["value"] is not None else "absent",
        )
    return table
