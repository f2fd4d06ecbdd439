"""Every operation of the OpenAPI document, asked with what the document allows and with what it
does not.

Left out: the stream, whose answer does not end (test_api_stream.py reads it); and the check that
what fits the schema is accepted, because rules between parameters (since <= until, a reduction of
the metric's instrument, a regular expression that is one) are no part of a schema.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.core.result import Ok

from services.aggregator.api.app import create_app
from services.aggregator.api.backend import Backend
from services.aggregator.batch import decode
from services.aggregator.ingest import Ingest
from services.common.columns import Item
from services.common.tokens import Tokens
from tests.services.aggregator.making import (
    INF,
    NAN,
    NOW_S,
    Producer,
    count,
    event,
    observed,
    placed,
    ratio,
)
from tests.services.aggregator.traced import send, trace_of

TOKEN = "s3cret"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}

NAMES = {
    "run": ("demo",),
    "key": (
        "loss",
        "rollout/inflight",
        "rollout/generated_tok_s",
        "custom/mine",
        "perf/step_s",
        "kl",
    ),
    "query": ("headrace_loss", "sum by (run) (rate(headrace_rollout_generated_tok_s_total[1m]))"),
    "match[]": ('{run="demo"}',),
    "start": (str(NOW_S - 60),),
    "end": (str(NOW_S),),
    "time": (str(NOW_S),),
    "step": ("10", 3),
    "group": ("0.0.1.0",),
    "row": (0,),
    "rollout_id": ("0.0.1.0/0",),
}
"""By parameter, what is there."""

EXAMPLES = 20
"""Of each operation and mode."""

load_all_checks()
LEFT_OUT = CHECKS.get_by_names(["positive_data_acceptance"])

boots = itertools.count()


def fill(ingest: Ingest) -> None:
    """A small run, with values that are absent, NaN and infinite, and with two attempts."""
    items: list[Item] = []
    for step in range(8):
        deltas = [
            ("loss", observed([1.0, NAN, -INF][: 1 + step % 3] if step else [NAN])),
            ("kl", ratio(step % 2, step % 2)),
            ("rollout/inflight", observed([3.0])),
            ("rollout/generated_tok_s", count(5)),
            ("custom/mine", count(1)),
            ("perf/step_s", observed([0.5])),
        ]
        items += placed(deltas, step=step, attempt=1 + step // 6, age_s=10.0 * (8 - step))
    events = [event(f"0.{row}.1.0", "trained", step=3) for row in range(3)]
    request = Producer("trainer-0", boot_id=f"boot-{next(boots)}").batch(items, events=events)
    ingest.take(decode(request), now_s=NOW_S)
    send(ingest, trace_of("0.0.1.0/0"))


@pytest.fixture
def app(backend: Backend, ingest: Ingest) -> FastAPI:
    fill(ingest)
    return create_app(backend, tokens=Tokens(TOKEN))


def operations(app: FastAPI) -> Iterator[Any]:
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    # The token is sent with every request, and schemathesis asks again without it.
    schema.config.generation.update(with_security_parameters=False)
    for found in schema.exclude(path_regex="/stream$").get_all_operations():
        assert isinstance(found, Ok), found
        yield found.ok()


def aim(case: Any, mode: GenerationMode) -> None:
    """Most of the names that are drawn at random become ones that are there."""
    places = [case.path_parameters]
    if mode is GenerationMode.POSITIVE:
        places.append(case.query)
    for place in places:
        for name, known in NAMES.items():
            drawn = place.get(name)
            if isinstance(drawn, str | int):
                place[name] = _aimed(drawn, known)
            elif isinstance(drawn, list):
                place[name] = [_aimed(each, known) for each in drawn]


def _aimed(drawn: str | int, known: tuple[str | int, ...]) -> str | int:
    fitting = [each for each in known if type(each) is type(drawn)]
    number = len(drawn) if isinstance(drawn, str) else drawn
    return fitting[number % len(fitting)] if fitting and number % 8 != 7 else drawn


def ask(operation: Any, mode: GenerationMode, ingest: Ingest) -> Counter[int]:
    """Ask one operation many times, and count the statuses; raises what schemathesis finds."""
    seen: Counter[int] = Counter()

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def each(case: Any) -> None:
        aim(case, mode)
        response = case.call(headers=HEADERS)
        seen[response.status_code] += 1
        if case.method == "DELETE" and response.status_code == 204:
            fill(ingest)
        case.validate_response(response, excluded_checks=LEFT_OUT)

    each()
    return seen


def test_what_the_document_allows_is_answered_as_it_says(app: FastAPI, ingest: Ingest) -> None:
    for operation in operations(app):
        seen = ask(operation, GenerationMode.POSITIVE, ingest)
        assert any(status < 300 for status in seen), f"{operation.label}: only {dict(seen)}"


def test_what_the_document_does_not_allow_is_refused(app: FastAPI, ingest: Ingest) -> None:
    for operation in operations(app):
        if len(operation.query) or len(operation.body):
            seen = ask(operation, GenerationMode.NEGATIVE, ingest)
            # Prometheus' own API takes what it does not know.
            refuses = not operation.path.startswith("/prometheus/")
            assert seen[422] or not refuses, f"{operation.label}: only {dict(seen)}"
