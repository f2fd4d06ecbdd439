"""The value of an expression at the times of a query."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from services.aggregator.promql.errors import QueryError
from services.aggregator.promql.parsing import (
    Aggregate,
    Arithmetic,
    Expression,
    Number,
    Over,
    Select,
)
from services.aggregator.promql.samples import Floats, Samples, Values
from services.aggregator.promql.selector import NAME

Load = Callable[[Select], Sequence[Samples]]
"""The samples that a selector reads, at all times of the query."""

OPERATIONS: dict[str, Callable[[Floats, Floats], Floats]] = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": np.divide,
    "%": np.fmod,
    "^": np.power,
}

Key = tuple[tuple[str, str], ...]


def evaluate(expression: Expression, times: Floats, load: Load) -> Floats | list[Values]:
    """A scalar's values at each time, or the series of a vector in the order of their labels.

    Raises QueryError where it has none, as when two series of the result have the same labels.
    """
    with np.errstate(all="ignore"):  # Division by zero is an infinity or NaN, as in Prometheus.
        found = _evaluated(expression, times, load)
    if isinstance(found, np.ndarray):
        return found
    keys = [_key(each.labels.items()) for each in found]
    if len(set(keys)) < len(keys):
        raise QueryError(
            "several series of the answer have the same labels; add a condition on the name, or "
            "aggregate them",
            error_type="execution",
        )
    return [each for _, each in sorted(zip(keys, found, strict=True), key=lambda pair: pair[0])]


def _evaluated(expression: Expression, times: Floats, load: Load) -> Floats | list[Values]:
    if isinstance(expression, Number):
        return np.full_like(times, expression.value)
    if isinstance(expression, Select):
        return [each.at(times - expression.offset_s) for each in load(expression)]
    if isinstance(expression, Over):
        selector = expression.of
        assert selector.range_s is not None
        moments = times - selector.offset_s
        return [
            each.over(expression.function, moments, selector.range_s) for each in load(selector)
        ]
    if isinstance(expression, Aggregate):
        return _aggregated(expression, evaluate(expression.of, times, load))
    return _arithmetic(
        expression,
        evaluate(expression.left, times, load),
        evaluate(expression.right, times, load),
    )


def _aggregated(expression: Aggregate, vector: Floats | list[Values]) -> list[Values]:
    assert isinstance(vector, list), "the parser lets only vectors be aggregated"
    groups: defaultdict[Key, list[Values]] = defaultdict(list)
    for each in vector:
        groups[_grouped(each, expression)].append(each)
    return [_merged(expression.operation, key, members) for key, members in groups.items()]


def _grouped(series: Values, expression: Aggregate) -> Key:
    chosen = expression.labels
    if expression.without:
        return _key(
            (label, value)
            for label, value in series.labels.items()
            if label not in chosen and label != NAME
        )
    return _key((label, value) for label, value in series.labels.items() if label in chosen)


def _merged(operation: str, key: Key, members: list[Values]) -> Values:
    values = np.stack([each.values for each in members])
    present = np.stack([each.present for each in members])
    counts = present.sum(axis=0)
    if operation == "count":
        result = counts.astype(np.float64)
    elif operation == "min":
        result = np.fmin.reduce(np.where(present, values, np.nan))
    elif operation == "max":
        result = np.fmax.reduce(np.where(present, values, np.nan))
    else:
        result = np.where(present, values, 0.0).sum(axis=0)
        if operation == "avg":
            result = result / np.maximum(counts, 1)
    return Values(dict(key), result, counts > 0)


def _arithmetic(
    expression: Arithmetic, left: Floats | list[Values], right: Floats | list[Values]
) -> Floats | list[Values]:
    operation = OPERATIONS[expression.operator]
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return operation(left, right)
    if isinstance(right, np.ndarray):
        assert isinstance(left, list)
        return [_unnamed(each, operation(each.values, right)) for each in left]
    if isinstance(left, np.ndarray):
        return [_unnamed(each, operation(left, each.values)) for each in right]
    others = _by_labels(right)
    pairs = [(each, others.get(key)) for key, each in _by_labels(left).items()]
    return [
        Values(
            _unnamed(each, each.values).labels,
            operation(each.values, other.values),
            each.present & other.present,
        )
        for each, other in pairs
        if other is not None
    ]


def _by_labels(vector: list[Values]) -> dict[Key, Values]:
    """Series by their labels without the name. Raises QueryError when two have the same."""
    found: dict[Key, Values] = {}
    for each in vector:
        key = _key((label, value) for label, value in each.labels.items() if label != NAME)
        if key in found:
            raise QueryError(
                "one side of an operation has several series of the same labels; aggregate them",
                error_type="execution",
            )
        found[key] = each
    return found


def _unnamed(series: Values, values: Floats) -> Values:
    """The series with new values: what has been computed with has no name."""
    labels = {label: value for label, value in series.labels.items() if label != NAME}
    return Values(labels, values, series.present)


def _key(labels: Iterable[tuple[str, str]]) -> Key:
    return tuple(sorted(labels))
