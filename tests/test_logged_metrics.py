"""The declared keys are those that services emit. A whole run is held against the catalogue in
test_end_to_end.py; here is what a run that goes well cannot show.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.aggregator.catalogue import CATALOGUE
from services.aggregator.metric import Catalogue, Metric
from tests.emitted import disagreements

SERVICES = Path(__file__).parents[1] / "services"

RECORDING = ("count", "observe", "observe_many", "ratio")
"""Methods of a recorder; a key without a namespace is told from other texts by them."""


def written_keys(*services: str) -> Iterator[re.Pattern[str]]:
    """What the code of some services spells out as `namespace/...`, or as the first argument of a
    recording call, as patterns: of an f-string's values any part of a key may come.
    """
    for path in (path for service in services for path in (SERVICES / service).rglob("*.py")):
        if "declared" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            parts: list[ast.expr] = []
            match node:
                case ast.Call(ast.Attribute(attr=called), [ast.Constant(str(key)), *_]):
                    if called in RECORDING:
                        yield re.compile(re.escape(key))
            if isinstance(node, ast.Constant):
                parts = [node]
            elif isinstance(node, ast.JoinedStr):
                parts = node.values
            texts = [p.value if isinstance(p, ast.Constant) else None for p in parts]
            if texts and isinstance(texts[0], str) and re.match(r"[a-z_]+/", texts[0]):
                yield re.compile(
                    "".join("[^/]+" if text is None else re.escape(str(text)) for text in texts)
                )


def test_a_conditional_key_has_code_that_records_it() -> None:
    written = {
        service: list(written_keys(service, "common"))
        for service in ("generator", "scorer", "trainer", "aggregator")
    }
    for metric in CATALOGUE.metrics:
        if metric.only_when is not None and metric.since is None:
            patterns = [each for service in metric.producers for each in written[service]]
            assert any(pattern.fullmatch(metric.key) for pattern in patterns), metric.key


def of(key: str, **rest: str) -> Metric:
    return Metric(key, "count", "1", "sum", ("trainer", "scorer"), "M.", **rest)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "services", "complaint"),
    [
        ("a", {"trainer"}, None),
        ("b/x", {"trainer", "scorer"}, None),
        ("conditional", {"trainer"}, None),
        ("undeclared", {"trainer"}, "undeclared: emitted, and not declared"),
        (
            "planned",
            {"trainer"},
            "planned: emitted, and still declared as planned (4 of 8)",
        ),
        (
            "conditional",
            {"generator", "trainer"},
            "conditional: emitted by generator, and declared for trainer, scorer",
        ),
        (
            "ingest/rejected/unknown_key",
            {"trainer"},
            "ingest/rejected/unknown_key: deltas were refused; the services' logs name their keys",
        ),
    ],
)
def test_what_is_emitted_must_be_declared_so(
    key: str, services: set[str], complaint: str | None
) -> None:
    catalogue = Catalogue(
        [
            of("a"),
            of("b/{c}"),
            of("planned", since="4 of 8"),
            of("conditional", only_when="it is"),
            of("ingest/rejected/{reason}", only_when="it is"),
        ]
    )
    found = {"a": {"trainer"}, "b/y": {"scorer"}, key: services}
    assert list(disagreements(catalogue, found)) == ([] if complaint is None else [complaint])


def test_what_is_declared_must_be_emitted() -> None:
    catalogue = Catalogue([of("a"), of("b/{c}"), of("p", since="4 of 8"), of("c", only_when="d")])
    assert list(disagreements(catalogue, {})) == [
        "a: declared, and nobody emits it",
        "b/{c}: declared, and nobody emits it",
    ]
