"""Asking an aggregator by REST, for the commands that take its address: what it refuses is the
user's mistake, what it cannot do is a failure.
"""

import ipaddress
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from services.common import tokens
from services.common.errors import UserError
from services.launcher.errors import RunFailed

TIMEOUT_S = 30.0
"""Of one query."""

DELETE_TIMEOUT_S = 600.0
"""Of the deletion of a run, which may hold many millions of rows."""

EXAMPLE = "http://localhost:8080"


@dataclass(frozen=True)
class Answer:
    """One answer of the aggregator."""

    body: dict[str, Any]
    text: str
    """The same as it came."""
    now: datetime | None
    """When it was made, by the aggregator's clock, to the second; None where a proxy hides it."""

    def age_s(self, moment: str | float) -> float | None:
        """Seconds from a time in the answer (ISO 8601, or seconds since 1970) to when it was made;
        negative for one to come.

        Both are the aggregator's times, so that this host's clock may be wrong.
        """
        if self.now is None:
            return None
        if isinstance(moment, str):
            moment = datetime.fromisoformat(moment).timestamp()
        return self.now.timestamp() - moment


@dataclass(frozen=True)
class Access:
    """What an aggregator may ask for."""

    token_file: Path | None = None
    """Its first line is sent as the bearer token."""
    ca_file: Path | None = None
    """Who may have signed the certificate of an https address; the system's authorities by
    default."""


class Aggregator:
    """The aggregator at an address; open one with asking().

    All methods raise UserError for an address or request that is not right, RunFailed when the
    aggregator cannot answer.
    """

    def __init__(self, address: httpx.URL, http: httpx.Client) -> None:
        self._address = address
        self._http = http

    def get(self, path: str, **parameters: object) -> Answer:
        """What is at a path under /api/v1; parameters that are None are left out."""
        given = {name: str(value) for name, value in parameters.items() if value is not None}
        return self._read(self._send("GET", path, params=given))

    def patch(self, path: str, body: Mapping[str, Any]) -> Answer:
        """Change what is at a path."""
        return self._read(self._send("PATCH", path, json=dict(body)))

    def delete(self, path: str) -> None:
        """Delete what is at a path."""
        response = self._send("DELETE", path, timeout=DELETE_TIMEOUT_S)
        if response.status_code != httpx.codes.NO_CONTENT:
            self._read(response)

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        whole = f"{self._address.path.rstrip('/')}/api/v1/{path}"
        target = self._address.copy_with(path=whole, query=None, fragment=None)
        try:
            return self._http.request(method, target, **options)
        except httpx.HTTPError as error:
            cause = str(error) or type(error).__name__
            raise UserError(f"URL: no aggregator answers at {self._address} ({cause})") from None

    def _read(self, response: httpx.Response) -> Answer:
        """Raises for every answer that is not a good one."""
        status = response.status_code
        try:
            body = response.json()
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise UserError(
                f"URL: what answers at {self._address} is no aggregator (status {status})"
            )
        if response.is_success:
            date = response.headers.get("Date")
            now = None if date is None else parsedate_to_datetime(date)
            return Answer(body, response.text, now)
        said = body.get("detail", f"status {status}")
        if status == httpx.codes.UNAUTHORIZED:
            raise UserError(
                f"{self._address} wants another token ({said}); name its file with --token-file"
            )
        if response.is_server_error:
            raise RunFailed(f"the aggregator at {self._address} cannot answer: {said}")
        raise UserError(f"{self._address} refuses: {said}")


@contextmanager
def asking(url: str, *, access: Access) -> Iterator[Aggregator]:
    """The aggregator at an address, while the block reads its answers. Raises UserError for an
    address, token or certificate that is not right, and where the block does not find what it
    reads.
    """
    address = _address(url)
    headers = {}
    if access.token_file is not None:
        first, *_ = tokens.read(access.token_file, key="--token-file")
        headers = {"Authorization": f"Bearer {first}"}
    # On this machine a proxy of the environment must not come between.
    with httpx.Client(
        headers=headers,
        timeout=TIMEOUT_S,
        trust_env=not _is_here(address.host),
        verify=True if access.ca_file is None else _trusting(access.ca_file),
    ) as http:
        try:
            yield Aggregator(address, http)
        except (KeyError, TypeError) as error:
            raise UserError(
                f"URL: {url} answers in another form than this release reads ({error!r}); use the "
                "aggregator's release"
            ) from None


def run_path(run: str, *parts: str) -> str:
    """The path of a run, and of what is under it. Raises UserError for a name that is no name:
    "" and ".." would lead elsewhere.
    """
    if not run.strip("."):
        raise UserError(f"RUN: {run!r} is no name of a run; `headrace runs list URL` shows them")
    return "/".join((f"runs/{quote(run, safe='')}", *parts))


def _address(url: str) -> httpx.URL:
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise UserError(f"URL: {url} is no address ({error}); write it as {EXAMPLE}") from None
    if address.scheme not in ("http", "https") or not address.host:
        raise UserError(f"URL: {url} is no address of an aggregator; write it as {EXAMPLE}")
    return address


def _trusting(ca_file: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise UserError(f"--ca-file: {ca_file} holds no PEM certificates ({error})") from None


def _is_here(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
