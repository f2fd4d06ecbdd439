"""Parameters of Prometheus' HTTP API, from the query and from a form, and its way to answer."""

import math
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any
from urllib.parse import parse_qs

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from services.aggregator.api.parameters import MAX_POSITION
from services.aggregator.promql.errors import QueryError
from services.aggregator.promql.parsing import seconds

MAX_FORM_BYTES = 65_536

FORM = "application/x-www-form-urlencoded"

NEEDED = "Needed: "
"""How the description of a parameter begins that has no default."""

Handler = Callable[["Asked"], Any]
"""Makes the `data` of an answer; blocking, so run in a worker thread. Raises QueryError."""


class Success(BaseModel):
    """An answer in Prometheus' form."""

    status: str
    """`success`."""
    data: Any
    """As Prometheus' documentation of this address says."""


class Failure(BaseModel):
    """A refusal in Prometheus' form."""

    status: str
    """`error`."""
    errorType: str
    """`bad_data`: no PromQL, or a parameter that cannot be. `execution`: beyond the subset or its
    limits."""
    error: str
    """What is wrong, and what can be asked."""


class Asked:
    """The parameters of one request: those of its address and those of its form."""

    def __init__(self, values: dict[str, list[str]]) -> None:
        self._values = values

    def all(self, name: str) -> list[str]:
        """Every value of a parameter."""
        return self._values.get(name, [])

    def text(self, name: str) -> str:
        """A parameter that is needed. Raises QueryError without it."""
        found = self.all(name)
        if not found or not found[0]:
            raise QueryError(f"{name}: is missing")
        return found[0]

    def time(self, name: str, default: float | None) -> float:
        """A time: seconds since 1970, or RFC 3339. Raises QueryError for what is neither, and
        without it where there is no default.
        """
        if default is not None and not any(self.all(name)):
            return default
        text = self.text(name)
        try:
            value = float(text)
        except ValueError:
            value = _moment(name, text)
        # Milliseconds, as Prometheus counts: what a float adds to them would miss a sample.
        return round(_sane(name, text, value), 3)

    def duration(self, name: str) -> float:
        """A duration: seconds, or such as 15s or 1m30s. Raises QueryError for what is neither."""
        text = self.text(name)
        try:
            value = float(text)
        except ValueError:
            parsed = seconds(text)
            if parsed is None:
                raise QueryError(f"{name}: {text[:80]!r} is no duration such as 15s") from None
            value = parsed
        return round(_sane(name, text, value), 3)


def _moment(name: str, text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            raise ValueError
        return moment.timestamp()
    except (ValueError, OverflowError):
        raise QueryError(
            f"{name}: {text[:80]!r} is no time: seconds since 1970, or 2026-01-01T12:00:00Z"
        ) from None


def _sane(name: str, text: str, value: float) -> float:
    if not math.isfinite(value) or abs(value) > MAX_POSITION:
        raise QueryError(f"{name}: {text[:80]!r} is out of range")
    return value


def endpoint(handler: Handler) -> Callable[[Request], Awaitable[JSONResponse]]:
    """A handler as FastAPI calls it."""

    async def answered(request: Request) -> JSONResponse:
        try:
            asked = await _asked(request)
            data = await run_in_threadpool(handler, asked)
        except QueryError as error:
            failure = Failure(status="error", errorType=error.error_type, error=str(error))
            return JSONResponse(failure.model_dump(), status_code=422)
        return JSONResponse({"status": "success", "data": data})

    return answered


async def _asked(request: Request) -> Asked:
    values = {name: [value] for name, value in request.path_params.items()}
    for name, value in request.query_params.multi_items():
        values.setdefault(name, []).append(value)
    if request.method == "POST":
        for name, found in (await _form(request)).items():
            values.setdefault(name, []).extend(found)
    return Asked(values)


async def _form(request: Request) -> dict[str, list[str]]:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_FORM_BYTES:
            raise QueryError(f"a form of more than {MAX_FORM_BYTES} bytes")
    kind = request.headers.get("content-type", FORM).split(";")[0].strip().lower()
    if body and kind != FORM:
        raise QueryError(f"Content-Type: must be {FORM}")
    try:
        return parse_qs(body.decode(), keep_blank_values=True, errors="strict")
    except ValueError:
        raise QueryError(f"the body is no form ({FORM}, UTF-8)") from None


def parameters(path: str, about: dict[str, str]) -> list[dict[str, Any]]:
    """The OpenAPI of text parameters, each with what is said of it; `match[]` may be repeated."""
    return [
        {
            "name": name,
            "in": "path" if f"{{{name}}}" in path else "query",
            "required": said.startswith(NEEDED),
            "description": said,
            "schema": {"type": "array", "items": {"type": "string"}}
            if name.endswith("[]")
            else {"type": "string"},
        }
        for name, said in about.items()
    ]
