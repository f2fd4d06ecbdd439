"""Which series a query means, and how each of them is reduced.

A key that is declared and that a run has not recorded (yet) has an empty history. One that is
neither declared nor recorded is not found, and one that has been renamed is answered with its new
name.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import HTTPException
from sqlalchemy import Connection

from services.aggregator.metric import CUSTOM_PREFIX, Catalogue, Metric
from services.aggregator.reduce import Reduction
from services.aggregator.series import RunRow, SeriesRow, find_series

NOT_RECORDED = -1
"""The id of a series that has no row: nothing is stored under it."""


@dataclass(frozen=True, slots=True)
class Selected:
    """A series of a run, and how it is reduced."""

    run: RunRow
    series: SeriesRow
    metric: Metric
    reduction: Reduction

    @property
    def unit(self) -> str:
        """Of its values."""
        return self.metric.unit_of(self.reduction)


def same_run(run: RunRow | None, earlier: RunRow) -> bool:
    """Whether a run is still the one that was found earlier, not another under its name.

    The database may give a deleted run's id to the next one; but when a run was first seen only
    ever moves back.
    """
    return run is not None and run.id == earlier.id and run.first_s <= earlier.first_s


def select_series(
    connection: Connection,
    runs: Sequence[RunRow],
    keys: Sequence[str],
    *,
    catalogue: Catalogue,
    reduce: Reduction | None,
) -> list[Selected]:
    """Every key of every run: all runs of the first key, then those of the next.

    A key that only some of the runs have recorded is empty in the others. Raises HTTPException 404
    for a key that none of them knows, 422 for a reduction that a key has not.
    """
    selected = []
    for key in keys:
        held = [_find(connection, run, key, catalogue) for run in runs]
        known = next((series for series in held if series is not None), None)
        if known is None:
            raise _unknown(key, runs, catalogue)
        for run, series in zip(runs, held, strict=True):
            series = series or SeriesRow(NOT_RECORDED, key, known.instrument)
            metric = catalogue.metric(key, instrument=series.instrument)
            selected.append(Selected(run, series, metric, _reduction(key, metric, reduce)))
    return selected


def _find(connection: Connection, run: RunRow, key: str, catalogue: Catalogue) -> SeriesRow | None:
    found = catalogue.find(key)
    if found is None and not (key.startswith(CUSTOM_PREFIX) and key.isprintable()):
        return None
    series = find_series(connection, run, key)
    if series is None and found is not None:
        return SeriesRow(NOT_RECORDED, key, found.metric.instrument)
    return series


def _reduction(key: str, metric: Metric, reduce: Reduction | None) -> Reduction:
    reduction = reduce or metric.default
    if reduction not in metric.reductions:
        allowed = ", ".join(metric.reductions)
        raise HTTPException(
            422, f"reduce: not for {key} ({metric.instrument}); choose one of {allowed}"
        )
    return reduction


def _unknown(key: str, runs: Sequence[RunRow], catalogue: Catalogue) -> HTTPException:
    renamed = catalogue.renamed.get(key)
    if renamed is not None:
        return HTTPException(404, f"{key} is called {' or '.join(renamed)} here")
    names = ", ".join(run.name for run in runs)
    return HTTPException(
        404,
        f"no metric {key[:80]!r} in {names}; /api/v1/runs/{runs[0].name}/metrics lists what a run "
        "has, /api/v1/catalogue what is declared",
    )
