"""The part of Prometheus' HTTP API that Grafana's data source needs, under /prometheus/api/v1."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter

from services.aggregator.api.backend import Backend
from services.aggregator.api.problems import documented
from services.aggregator.api.prometheus_form import (
    NEEDED,
    Asked,
    Failure,
    Handler,
    Success,
    endpoint,
    parameters,
)
from services.aggregator.exposition import number
from services.aggregator.promql.errors import QueryError
from services.aggregator.promql.evaluation import evaluate
from services.aggregator.promql.grid import Grid
from services.aggregator.promql.names import Names
from services.aggregator.promql.parsing import parse, parse_selector
from services.aggregator.promql.samples import Floats, Values
from services.aggregator.promql.selector import Matcher
from services.aggregator.promql.source import PRODUCER, Source

LIKE_VERSION = "2.42.0"
"""The Prometheus whose API this is a part of: Grafana asks, and leaves out what is newer."""

MAX_VALUES = 500_000
"""Values of one answer."""

MAX_TIME_S = 2.0**53

Labels = dict[str, str]

QUERY = {"query": f"{NEEDED}PromQL."}
INSTANT = {"time": "Seconds since 1970 or RFC 3339; now by default."}
RANGE = {
    "start": f"{NEEDED}seconds since 1970 or RFC 3339.",
    "end": f"{NEEDED}the last time, included.",
    "step": f"{NEEDED}seconds, or such as 15s.",
}
MATCH = {"match[]": "A series selector; several select what any of them does."}
WITHIN = {
    "start": "Of runs that were heard of since then; seconds since 1970 or RFC 3339.",
    "end": "Of runs that had begun by then.",
}


def router(backend: Backend, names: Names, *, clock: Callable[[], float] = time.time) -> APIRouter:
    """The endpoints; `clock` tells seconds since 1970."""
    routes = APIRouter(prefix="/prometheus/api/v1", tags=["prometheus"])
    answers = _Answers(backend, names, clock)

    def add(path: str, handler: Handler, summary: str, about: dict[str, str]) -> None:
        for method in ("GET", "POST"):
            routes.add_api_route(
                path,
                endpoint(handler),
                methods=[method],
                summary=summary,
                operation_id=f"prometheus_{handler.__name__}_{method.lower()}",
                # A form may say all that the address says: it is described once.
                include_in_schema=method == "GET",
                response_model=Success,
                responses={422: {"model": Failure}, **documented(401, 503)},
                openapi_extra={"parameters": parameters(path, about)},
            )

    add("/query", answers.query, "PromQL at one time", QUERY | INSTANT)
    add("/query_range", answers.query_range, "PromQL over a time", QUERY | RANGE)
    add("/series", answers.series, "Labels of series", MATCH | WITHIN)
    add("/labels", answers.labels, "Names of labels", MATCH | WITHIN)
    label = {"label": f"{NEEDED}such as run, producer, or __name__."}
    add("/label/{label}/values", answers.label_values, "Values of a label", label | MATCH | WITHIN)
    metric = {"metric": "Only this name."}
    add("/metadata", answers.metadata, "Types and meanings of names", metric)
    add("/status/buildinfo", answers.buildinfo, "What answers here", {})
    return routes


class _Answers:
    """Each method makes the `data` of one address; blocking. They raise QueryError."""

    def __init__(self, backend: Backend, names: Names, clock: Callable[[], float]) -> None:
        self._backend = backend
        self._names = names
        self._clock = clock

    def query(self, asked: Asked) -> Any:
        expression = parse(asked.text("query"))
        grid = Grid.moment(asked.time("time", self._clock()))
        with self._source() as source:
            found = evaluate(expression, grid.times, lambda select: source.load(select, grid))
        if not isinstance(found, list):
            return {"resultType": "scalar", "result": [grid.start_s, number(found[0])]}
        return {
            "resultType": "vector",
            "result": [
                {"metric": each.labels, "value": [grid.start_s, number(each.values[0])]}
                for each in found
                if each.present[0]
            ],
        }

    def query_range(self, asked: Asked) -> Any:
        expression = parse(asked.text("query"))
        grid = Grid(asked.time("start", None), asked.time("end", None), asked.duration("step"))
        times = grid.times
        with self._source() as source:
            found = evaluate(expression, times, lambda select: source.load(select, grid))
        if not isinstance(found, list):
            return {
                "resultType": "matrix",
                "result": [{"metric": {}, "values": _values(times, found)}],
            }
        _check_size(found)
        return {
            "resultType": "matrix",
            "result": [
                {"metric": each.labels, "values": _values(times[here], each.values[here])}
                for each in found
                for here in [each.present]
                if here.any()
            ],
        }

    def series(self, asked: Asked) -> list[Labels]:
        selectors = _selectors(asked)
        if not selectors:
            raise QueryError("match[]: is missing; name at least one selector")
        return self._labels(selectors, asked)

    def labels(self, asked: Asked) -> list[str]:
        return sorted({label for labels in self._keys(asked) for label in labels})

    def label_values(self, asked: Asked) -> list[str]:
        label = asked.text("label")
        if label == PRODUCER:
            selectors = _selectors(asked)
            found = self._labels(selectors, asked) if selectors else self._producers(asked)
        else:
            found = self._keys(asked)
        return sorted({labels[label] for labels in found if label in labels})

    def metadata(self, asked: Asked) -> dict[str, list[dict[str, str]]]:
        wanted = asked.all("metric")
        return {
            family.name: [{"type": family.type, "help": family.help, "unit": ""}]
            for family in self._names.families
            if not wanted or family.name in wanted
        }

    def buildinfo(self, _asked: Asked) -> dict[str, str]:
        return {
            "version": LIKE_VERSION,
            "revision": f"headrace-{version('headrace')}",
            "branch": "",
            "buildUser": "",
            "buildDate": "",
            "goVersion": "",
        }

    @contextmanager
    def _source(self) -> Iterator[Source]:
        with self._backend.read() as connection:
            yield Source(connection, self._names)

    def _keys(self, asked: Asked) -> list[Labels]:
        """Labels of the keys that a request selects, with an empty producer where they have one."""
        selectors = _selectors(asked)
        if any(matcher.label == PRODUCER for each in selectors for matcher in each):
            return self._labels(selectors, asked)
        start_s, end_s = self._within(asked)
        with self._source() as source:
            return [
                {**found.labels} if found.family.pooled else {**found.labels, PRODUCER: ""}
                for selector in selectors or [()]
                for found in source.find(selector, since_s=start_s, until_s=end_s)
            ]

    def _labels(self, selectors: list[tuple[Matcher, ...]], asked: Asked) -> list[Labels]:
        """Labels of the series that any of the selectors selects, each once."""
        start_s, end_s = self._within(asked)
        with self._source() as source:
            found = {
                tuple(sorted(labels.items())): labels
                for selector in selectors
                for labels in source.labels(selector, since_s=start_s, until_s=end_s)
            }
        return [found[key] for key in sorted(found)]

    def _producers(self, asked: Asked) -> list[Labels]:
        start_s, end_s = self._within(asked)
        with self._source() as source:
            names = source.producers(since_s=start_s, until_s=end_s)
        return [{PRODUCER: name} for name in names]

    def _within(self, asked: Asked) -> tuple[float, float]:
        return asked.time("start", -MAX_TIME_S), asked.time("end", MAX_TIME_S)


def _selectors(asked: Asked) -> list[tuple[Matcher, ...]]:
    return [parse_selector(each) for each in asked.all("match[]")]


def _check_size(found: list[Values]) -> None:
    total = sum(int(each.present.sum()) for each in found)
    if total > MAX_VALUES:
        raise QueryError(
            f"the answer has {total} values, more than {MAX_VALUES}: aggregate the series, or "
            "choose a longer step",
            error_type="execution",
        )


def _values(times: Floats, values: Floats) -> list[list[Any]]:
    return [
        [int(time_s) if time_s.is_integer() else round(time_s, 3), number(value)]
        for time_s, value in zip(times.tolist(), values.tolist(), strict=True)
    ]
