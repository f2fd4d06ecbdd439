"""From PromQL's text to the few kinds of expression that are answered; all others are refused by
name.
"""

import re
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import promql_parser as parser

from services.aggregator.promql.errors import QueryError, unsupported
from services.aggregator.promql.selector import NAME, Matcher, Operator

MAX_QUERY = 10_000
"""Characters of a query."""

MAX_SYNTAX = 1000
"""Of them, those outside quotes: the parser takes time quadratic in what is nested."""

QUOTED = re.compile(r"""\"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|`[^`]*`""", re.DOTALL)

MAX_LENGTH = timedelta(days=36_500)
"""Of a range or an offset."""

MAX_DEPTH = 100
"""Expressions within expressions."""

RANGE_FUNCTIONS = (
    "rate",
    "increase",
    "avg_over_time",
    "min_over_time",
    "max_over_time",
    "sum_over_time",
    "count_over_time",
    "last_over_time",
)
"""Functions of a window of samples."""

OF_EVERY_SAMPLE = ("sum_over_time", "count_over_time")
"""Those whose value depends on how many samples there are: they are of the finest buckets always.
"""

AGGREGATIONS = ("sum", "avg", "min", "max", "count")

ARITHMETIC = ("+", "-", "*", "/", "%", "^")

OPERATORS: dict[str, Operator] = {
    "MatchOp.Equal": "=",
    "MatchOp.NotEqual": "!=",
    "MatchOp.Re": "=~",
    "MatchOp.NotRe": "!~",
}


@dataclass(frozen=True, slots=True)
class Number:
    """A scalar."""

    value: float


@dataclass(frozen=True, slots=True)
class Select:
    """Series by their labels. `range_s` is the window of the function around it, else None;
    `offset_s` how far back it looks; `finest`: not in coarser buckets, however long the step.
    """

    matchers: tuple[Matcher, ...]
    range_s: float | None
    offset_s: float
    finest: bool = False


@dataclass(frozen=True, slots=True)
class Over:
    """One of RANGE_FUNCTIONS over each series of a selector."""

    function: str
    of: Select


@dataclass(frozen=True, slots=True)
class Aggregate:
    """One of AGGREGATIONS over series whose `labels` are the same; `without`: whose others are."""

    operation: str
    of: "Expression"
    labels: tuple[str, ...]
    without: bool


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """One of ARITHMETIC between two expressions."""

    operator: str
    left: "Expression"
    right: "Expression"


Expression = Number | Select | Over | Aggregate | Arithmetic


def parse(text: str) -> Expression:
    """The expression. Raises QueryError when it is no PromQL, or beyond the subset."""
    return _converted(_parsed(text), MAX_DEPTH)


def parse_selector(text: str) -> tuple[Matcher, ...]:
    """The matchers of a series selector, as `match[]` gives one. Raises QueryError."""
    found = _converted(_parsed(text), MAX_DEPTH)
    if not isinstance(found, Select) or found.offset_s:
        raise QueryError(f"match[]: {text[:80]!r} is not a series selector")
    return found.matchers


def seconds(text: str) -> float | None:
    """A duration such as 1m or 1h30m in seconds; None for what is none."""
    try:
        return parser.parse_duration(text).total_seconds()
    except (ValueError, OverflowError):
        return None


def _parsed(text: str) -> Any:
    if len(text) > MAX_QUERY or len(QUOTED.sub("", text)) > MAX_SYNTAX:
        raise QueryError(
            f"query: more than {MAX_QUERY} characters, or {MAX_SYNTAX} beside quoted texts"
        )
    try:
        return parser.parse(text)
    except ValueError as error:
        raise QueryError(f"query: {error}") from None
    except BaseException as error:
        # What panics in Rust (`x offset inf`) comes as no Exception; its class cannot be imported.
        if type(error).__name__ != "PanicException":
            raise
        raise QueryError(f"query: {error}") from None


def _converted(node: Any, depth: int) -> Expression:
    if depth == 0:
        raise QueryError(f"query: nested more than {MAX_DEPTH} deep", error_type="execution")
    if isinstance(node, parser.ParenExpr):
        return _converted(node.expr, depth - 1)
    if isinstance(node, parser.NumberLiteral):
        return Number(node.val)
    if isinstance(node, parser.VectorSelector):
        return _selected(node, range_s=None)
    if isinstance(node, parser.Call):
        return _call(node)
    if isinstance(node, parser.UnaryExpr):
        return Arithmetic("*", Number(-1.0), _converted(node.expr, depth - 1))
    if isinstance(node, parser.AggregateExpr):
        return _aggregate(node, depth)
    if isinstance(node, parser.BinaryExpr):
        return _arithmetic(node, depth)
    if isinstance(node, parser.MatrixSelector):
        raise unsupported("a range outside a function")
    if isinstance(node, parser.SubqueryExpr):
        raise unsupported("a subquery")
    raise unsupported("a text")


def _selected(node: Any, *, range_s: float | None) -> Select:
    if node.at is not None:
        raise unsupported("the modifier @")
    if node.matchers.or_matchers:
        raise unsupported("or between matchers")
    matchers = [
        Matcher(each.name, OPERATORS[str(each.op)], each.value) for each in node.matchers.matchers
    ]
    if node.name is not None:
        matchers.insert(0, Matcher(NAME, "=", node.name))
    offset_s = 0.0 if node.offset is None else _length("offset", node.offset)
    return Select(tuple(matchers), range_s, offset_s)


def _length(name: str, length: timedelta) -> float:
    """A range or an offset in seconds. Raises QueryError for one beyond MAX_LENGTH."""
    if abs(length) > MAX_LENGTH:
        raise QueryError(f"{name}: more than {MAX_LENGTH.days} days")
    return length.total_seconds()


def _call(node: Any) -> Over:
    name = node.func.name
    if name not in RANGE_FUNCTIONS:
        raise unsupported(f"the function {name}")
    (argument,) = node.args
    if not isinstance(argument, parser.MatrixSelector):
        raise unsupported(f"{name} of anything but a selector with a range")
    range_s = _length("range", argument.range)
    selected = _selected(argument.vector_selector, range_s=range_s)
    return Over(name, replace(selected, finest=name in OF_EVERY_SAMPLE))


def _aggregate(node: Any, depth: int) -> Aggregate:
    operation = str(node.op)
    if operation not in AGGREGATIONS:
        raise unsupported(f"the aggregation {operation}")
    of = _converted(node.expr, depth - 1)
    modifier = node.modifier
    if modifier is None:
        return Aggregate(operation, of, (), without=False)
    without = modifier.type == parser.AggModifierType.Without
    return Aggregate(operation, of, tuple(modifier.labels), without=without)


def _arithmetic(node: Any, depth: int) -> Arithmetic:
    operator = str(node.op)
    if operator not in ARITHMETIC:
        raise unsupported(f"the operator {operator}")
    modifier = node.modifier
    if modifier is not None and (
        modifier.matching is not None
        or str(modifier.card) != "VectorMatchCardinality.OneToOne"
        or any(each is not None for each in (modifier.fill_values.lhs, modifier.fill_values.rhs))
    ):
        raise unsupported("on, ignoring, group_left, group_right or fill")
    left, right = _converted(node.lhs, depth - 1), _converted(node.rhs, depth - 1)
    return Arithmetic(operator, left, right)
