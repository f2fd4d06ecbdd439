"""What queries take as parameters: their types, and positions on an axis as people write them."""

from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import HTTPException, Path, Query, Request
from pydantic import BeforeValidator

from services.aggregator import history
from services.aggregator import reduce as reductions

MAX_POSITION = 2**53
"""Steps and seconds beyond this are nobody's; a double still holds them exactly."""

POSITION = {
    "pattern": "^(-?[0-9]{1,15}|[0-9]{4}-[0-1][0-9]-[0-3][0-9]T[0-2][0-9]:[0-5][0-9]:[0-5][0-9]Z)$"
}
"""How most positions are written, for the document's readers; more forms of a time are taken."""

MAX_POINTS = 10_000
"""Most points of one history in one answer; a larger wish is capped."""

DEFAULT_POINTS = 1000


def _whole(value: object) -> object:
    # pydantic takes "5.0" for an integer; the document, which says integer, does not.
    if isinstance(value, str) and "." in value:
        raise ValueError("write a whole number without a decimal point")
    return value


WHOLE = BeforeValidator(_whole)
"""After the constraints of an integer parameter: it is written as an integer."""

Key = Annotated[str, Path(description="Such as reward, or perf/step_s.")]

Axis = Annotated[
    history.Axis,
    Query(
        description="By step: the surviving line, one value a step. By time: all attempts, in "
        "windows of 10 s or more."
    ),
]

Reduce = Annotated[
    reductions.Reduction | None,
    Query(description="By default the metric's first reduction; /api/v1/catalogue lists them."),
]

Since = Annotated[
    str | None,
    Query(
        description="The first step; or, with axis=time, the first moment: seconds since 1970 or "
        "ISO 8601 (without a zone: UTC). The range is since <= x < until.",
        examples=["40"],
        json_schema_extra=POSITION,
    ),
]

Until = Annotated[
    str | None,
    Query(
        description="The step or the moment before which the range ends; written as `since` is.",
        examples=["80"],
        json_schema_extra=POSITION,
    ),
]

Attempt = Annotated[
    int | None,
    Query(
        ge=0,
        le=MAX_POSITION,
        description="Only this start of the trainer, also where a later one made its steps again.",
    ),
    WHOLE,
]

GroupBy = Annotated[
    Literal["producer"] | None, Query(description="Also each producer (replica) alone.")
]


def refuse_unknown(request: Request) -> None:
    """Raises HTTPException 422 for a query parameter that the endpoint has not: a misspelt
    `max_points` must not be answered as if it had not been sent.
    """
    described = request.app.openapi()["paths"][request.scope["route"].path_format]
    taken = [
        each["name"]
        for each in described[request.method.lower()].get("parameters", ())
        if each["in"] == "query"
    ]
    for name in request.query_params:
        if name not in taken:
            known = f"it has {', '.join(taken)}" if taken else "it has none"
            raise HTTPException(422, f"{name[:80]!r} is no parameter of this endpoint; {known}")


def position(name: str, text: str | None, *, axis: history.Axis) -> float | None:
    """`since` or `until`: a step, or a time as seconds since 1970 or ISO 8601 (without a zone:
    UTC).

    Raises HTTPException 422 for what is neither.
    """
    if text is None:
        return None
    if axis == "step":
        try:
            value: float = int(text)
        except ValueError:
            raise _refused(name, text, "a step, such as 40") from None
    else:
        value = _seconds(name, text)
    # Written so that NaN is refused too, and an integer too long for a double is not converted.
    if not -MAX_POSITION <= value <= MAX_POSITION:
        raise _refused(name, text, "a position that a run can have")
    return value


def span(
    since: str | None, until: str | None, *, axis: history.Axis
) -> tuple[float | None, float | None]:
    """The range of a query. Raises HTTPException 422 when it cannot be read, or when `since` is
    after `until`.
    """
    begin, end = position("since", since, axis=axis), position("until", until, axis=axis)
    if begin is not None and end is not None and begin > end:
        raise HTTPException(422, "since: is after until; the range is since <= x < until")
    return begin, end


def _seconds(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise _refused(
            name,
            text,
            "a time: seconds since 1970, or 2026-01-01T12:00:00Z (write the + of a zone as %2B)",
        ) from None


def _refused(name: str, text: str, wanted: str) -> HTTPException:
    return HTTPException(422, f"{name}: {text[:80]!r} is not {wanted}")
