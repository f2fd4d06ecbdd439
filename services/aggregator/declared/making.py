"""Short ways to write a declaration, one for each instrument."""

from services.aggregator.metric import Metric, Services
from services.aggregator.reduce import Reduction

G: Services = ("generator",)
S: Services = ("scorer",)
T: Services = ("trainer",)
A: Services = ("aggregator",)


def count(
    key: str,
    producers: Services,
    unit: str,
    meaning: str,
    *,
    default: Reduction = "sum",
    since: str | None = None,
    only_when: str | None = None,
    old_names: tuple[str, ...] = (),
) -> Metric:
    """A key that adds up; its unit is the sum's."""
    return Metric(
        key,
        "count",
        unit,
        default,
        producers,
        meaning,
        since=since,
        only_when=only_when,
        old_names=old_names,
    )


def observed(
    key: str,
    producers: Services,
    unit: str,
    meaning: str,
    *,
    default: Reduction = "mean",
    since: str | None = None,
    only_when: str | None = None,
    old_names: tuple[str, ...] = (),
) -> Metric:
    """A key with one value each time that something happens."""
    return Metric(
        key,
        "observation",
        unit,
        default,
        producers,
        meaning,
        since=since,
        only_when=only_when,
        old_names=old_names,
    )


def ratio(
    key: str,
    producers: Services,
    meaning: str,
    *,
    unit: str = "1",
    since: str | None = None,
    only_when: str | None = None,
    old_names: tuple[str, ...] = (),
) -> Metric:
    """A key whose numerators and denominators add up."""
    return Metric(
        key,
        "ratio",
        unit,
        "ratio",
        producers,
        meaning,
        since=since,
        only_when=only_when,
        old_names=old_names,
    )
