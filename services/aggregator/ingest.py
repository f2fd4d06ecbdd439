"""From batches to rows: checked against the catalogue, placed in time, named and committed at once.

The aggregator never asks a producer's clock what time it is: a delta that ended `now_s - end_s`
seconds before its batch was sent ended so long before the batch arrived, on the aggregator's own
clock (with PostgreSQL, the database's).
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from services.aggregator.batch import Batch, Rejected
from services.aggregator.catalogue import CATALOGUE
from services.aggregator.metric import (
    CUSTOM_PREFIX,
    MAX_PLACEHOLDER_VALUES,
    OTHER,
    Catalogue,
    Metric,
)
from services.aggregator.reduce import Instrument
from services.aggregator.registry import (
    Attempt,
    Run,
    boot_of,
    make_series,
    producer_of,
    source_of,
)
from services.aggregator.rows import NOT_A_RATIO, NOT_OBSERVED, Row
from services.aggregator.schema import BUCKET_S, STEP_BLOCK, TIME_BLOCK, TIME_LANE
from services.aggregator.store import Store, Writing
from services.aggregator.table import Table
from services.aggregator.transaction import Changed
from services.common.traces_config import Traces

REFUSED = -1
"""Instead of the series of a key that has none."""

CUSTOM = CUSTOM_PREFIX + "{name}"
"""What custom keys count as, in the bound on series."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of a batch."""

    accepted: int
    duplicate: bool
    rejected: tuple[Rejected, ...]


@dataclass(slots=True)
class _About:
    """What the aggregator measures of the batches of one run."""

    now_s: float
    duplicates: int = 0
    accepted: int = 0
    rejected: Counter[str] = field(default_factory=Counter)


class Ingest:
    """Takes batches into the store, and records ingest/* about them as the producer `producer`."""

    def __init__(
        self,
        store: Store,
        *,
        catalogue: Catalogue = CATALOGUE,
        producer: str = "aggregator",
        traces: Traces = Traces(),  # noqa: B008 - it is frozen
    ) -> None:
        self._store = store
        self._catalogue = catalogue
        self._producer = producer
        self._traces = traces

    def take(self, batch: Batch, *, now_s: float) -> Receipt:
        """Add a batch that arrived at `now_s`, in one transaction; the same batch again changes
        nothing.

        Raises SQLAlchemyError when it could not be committed; then nothing of it was.
        """
        return self.take_all([(batch, now_s)])[0]

    def take_all(self, batches: Sequence[tuple[Batch, float]]) -> list[Receipt]:
        """Add several batches with the times of their arrival, all in one transaction. They are
        used up: to send one again after an error, decode it again.
        """
        with self._store.write() as writing:
            owners = [
                self._owner(writing, batch, now_s + writing.ahead_s) for batch, now_s in batches
            ]
            claims: dict[int, tuple[Run, list[int]]] = {}
            for (batch, _), (run, _, _, boot) in zip(batches, owners, strict=True):
                claims.setdefault(boot, (run, []))[1].append(batch.sequence)
            new = writing.transaction.claim(claims)
            about: dict[str, _About] = {}
            receipts = []
            for (batch, arrived_s), (run, producer_id, source_id, boot) in zip(
                batches, owners, strict=True
            ):
                now_s = arrived_s + writing.ahead_s
                seen = about.setdefault(run.name, _About(now_s))
                seen.now_s = max(seen.now_s, now_s)
                if (boot, batch.sequence) in new:
                    new.remove((boot, batch.sequence))
                    receipt = self._add(writing, run, batch, now_s, producer_id, source_id)
                else:
                    receipt = Receipt(accepted=0, duplicate=True, rejected=())
                    _see(writing.transaction.of(run), producer_id, now_s, now_s)
                seen.duplicates += receipt.duplicate
                seen.accepted += receipt.accepted
                for each in receipt.rejected:
                    seen.rejected[each.reason] += each.number
                receipts.append(receipt)
            for name, found in about.items():
                self._record(writing, writing.run(name, now_s=found.now_s), found)
            writing.transaction.finish(
                now_s=max(found.now_s for found in about.values()), traces=self._traces
            )
        return receipts

    def _owner(self, writing: Writing, batch: Batch, now_s: float) -> tuple[Run, int, int, int]:
        """The run, producer, source and boot of a batch."""
        run = writing.run(batch.run, now_s=now_s)
        producer_id = run.producers.get(batch.producer)
        boot = None if producer_id is None else run.boots.get((producer_id, batch.boot_id))
        if producer_id is None or boot is None or producer_id not in run.sources:
            with writing.ids(run) as connection:
                producer_id = producer_of(
                    connection, run, batch.producer, service=batch.service, now_s=now_s
                )
                source_of(connection, run, producer_id, writer=writing.writer)
                boot = boot_of(connection, run, producer_id, batch.boot_id)
        return run, producer_id, run.sources[producer_id], boot

    def _add(
        self,
        writing: Writing,
        run: Run,
        batch: Batch,
        now_s: float,
        producer_id: int,
        source_id: int,
    ) -> Receipt:
        """Merge a batch into the rows of its places."""
        transaction, shift_s = writing.transaction, now_s - batch.now_s
        changed = transaction.of(run)
        rejected = list(batch.rejected)
        accepted, first_s = 0, now_s
        for table in batch.tables:
            table, series_ids = self._known(writing, run, batch.keys, table, rejected)
            if not len(table):
                continue
            accepted += len(table)
            first_s = min(first_s, float(table.begin_s.min()) + shift_s)
            buckets = np.floor((table.end_s + shift_s) / BUCKET_S).astype(np.int64)
            steps, attempts = table.step.astype(np.int64), table.attempt.astype(np.int64)
            _place(changed, series_ids, attempts, steps, buckets)
            _widen(changed, _attempts(table, attempts, steps, shift_s))
            columns = [each.tolist() for each in (series_ids, attempts, steps, buckets)]
            sources = itertools.repeat(source_id, len(table))
            places = zip(*columns[:3], sources, columns[3], strict=True)
            transaction.add(run, source_id, places, table.rows(shift_s))
        _see(changed, producer_id, first_s, now_s)
        changed.events.extend((event, event.at_s + shift_s) for event in batch.events)
        changed.traces.extend((trace, trace.at_s + shift_s) for trace in batch.traces)
        return Receipt(accepted=accepted, duplicate=False, rejected=tuple(rejected))

    def _known(
        self,
        writing: Writing,
        run: Run,
        keys: Sequence[str],
        table: Table,
        rejected: list[Rejected],
    ) -> tuple[Table, np.ndarray[Any, Any]]:
        """The partials whose keys have a series, and these series; the others are rejected."""
        ids = [REFUSED] * len(keys)
        used, numbers = np.unique(table.key, return_counts=True)
        for index, number in zip(used.tolist(), numbers.tolist(), strict=True):
            key = keys[index]
            known = run.series.get(key)
            if known is not None and known[1] == table.instrument:
                ids[index] = known[0]
                continue
            found = self._series(writing, run, key, table.instrument)
            if isinstance(found, Rejected):
                rejected.append(replace(found, number=number))
            else:
                ids[index] = found
        series_ids = np.array(ids, np.int64)[table.key]
        keep = series_ids != REFUSED
        return table.kept(keep), series_ids[keep]

    def _series(
        self, writing: Writing, run: Run, key: str, instrument: Instrument
    ) -> int | Rejected:
        """The series that a key belongs to, or why it has none."""
        found = self._catalogue.find(key)
        bounded = True
        if found is not None:
            metric, declared = found.metric, found.metric.key
            if metric.instrument != instrument:
                return _wrong_instrument(key, declared=metric.instrument, sent=instrument)
            bounded = found.value is not None
        elif key.startswith(CUSTOM_PREFIX) and key != CUSTOM_PREFIX:
            metric, declared = None, CUSTOM
        else:
            return Rejected(
                key,
                "unknown_key",
                f"not in the catalogue; declare it, or record it as {CUSTOM_PREFIX}NAME",
            )
        if key not in run.series and bounded:
            key = _bounded(run, key, declared, metric)
        if key not in run.series:
            with writing.ids(run, refresh=True) as connection:
                if bounded:
                    key = _bounded(run, key, declared, metric)
                if key not in run.series:
                    make_series(connection, run, key, declared=declared, instrument=instrument)
        series_id, held = run.series[key]
        if held != instrument:
            return _wrong_instrument(key, declared=held, sent=instrument)
        return series_id

    def _record(self, writing: Writing, run: Run, about: _About) -> None:
        """Add the aggregator's own metrics, at the run's present attempt and step."""
        now_s = about.now_s
        producer_id = run.producers.get(self._producer)
        if producer_id is None or producer_id not in run.sources:
            with writing.ids(run) as connection:
                producer_id = producer_of(
                    connection, run, self._producer, service="aggregator", now_s=now_s
                )
                source_of(connection, run, producer_id, writer=writing.writer)
        changed = writing.transaction.of(run)
        attempt, step = _latest(run, changed)
        source_id, bucket = run.sources[producer_id], math.floor(now_s / BUCKET_S)
        for key, instrument, row in _own(run, about):
            series_id = self._series(writing, run, key, instrument)
            assert not isinstance(series_id, Rejected), series_id
            place = (series_id, attempt, step, source_id, bucket)
            _place(changed, *(np.array([each]) for each in (series_id, attempt, step, bucket)))
            writing.transaction.add(run, source_id, [place], [row])
        _widen(changed, {attempt: Attempt(step, step, now_s, now_s)})
        _see(changed, producer_id, now_s, now_s)


def _place(
    changed: Changed,
    series_ids: np.ndarray[Any, Any],
    attempts: np.ndarray[Any, Any],
    steps: np.ndarray[Any, Any],
    buckets: np.ndarray[Any, Any],
) -> None:
    """Note what rows touch, one of each array's elements a row."""
    changed.moments.update(zip(attempts.tolist(), buckets.tolist(), steps.tolist(), strict=True))
    _touch(changed, series_ids, attempts, steps // STEP_BLOCK)
    _touch(changed, series_ids, np.full_like(attempts, TIME_LANE), buckets // TIME_BLOCK)


def _touch(
    changed: Changed,
    series_ids: np.ndarray[Any, Any],
    lanes: np.ndarray[Any, Any],
    blocks: np.ndarray[Any, Any],
) -> None:
    left = np.ones(len(series_ids), bool)
    while left.any():  # once for most batches: they are of one block
        first = int(np.argmax(left))
        here = (lanes == lanes[first]) & (blocks == blocks[first])
        changed.touched[int(lanes[first]), int(blocks[first])].update(series_ids[here].tolist())
        left &= ~here


def _widen(changed: Changed, seen: Mapping[int, Attempt]) -> None:
    for attempt, each in seen.items():
        known = changed.attempts.get(attempt)
        changed.attempts[attempt] = each if known is None else known.widened(each)


def _see(changed: Changed, producer_id: int, first_s: float, last_s: float) -> None:
    known = changed.producers.get(producer_id, (first_s, last_s))
    changed.producers[producer_id] = (min(first_s, known[0]), max(last_s, known[1]))


def _latest(run: Run, changed: Changed) -> tuple[int, int]:
    """The latest (attempt, step), with what is being written."""
    latest = {attempt: seen.last_step for attempt, seen in changed.attempts.items()}
    attempt = max(latest, default=0)
    return max(run.now, (attempt, latest.get(attempt, 0)))


def _bounded(run: Run, key: str, declared: str, metric: Metric | None) -> str:
    """The key itself, or `other` when its placeholder has too many values already."""
    if key in run.series or run.declared[declared] < MAX_PLACEHOLDER_VALUES:
        return key
    return CUSTOM_PREFIX + OTHER if metric is None else metric.key_for(OTHER)


def _wrong_instrument(key: str, *, declared: Instrument, sent: Instrument) -> Rejected:
    return Rejected(key, "wrong_instrument", f"declared as {declared}, sent as {sent}")


def _attempts(
    table: Table, attempts: np.ndarray[Any, Any], steps: np.ndarray[Any, Any], shift_s: float
) -> dict[int, Attempt]:
    """By attempt, the steps and times of some partials."""
    seen = {}
    for attempt in np.unique(attempts).tolist():
        own = attempts == attempt
        seen[attempt] = Attempt(
            first_step=int(steps[own].min()),
            last_step=int(steps[own].max()),
            first_s=float(table.begin_s[own].min()) + shift_s,
            last_s=float(table.end_s[own].max()) + shift_s,
        )
    return seen


def _own(run: Run, about: _About) -> Iterable[tuple[str, Instrument, Row]]:
    """What the aggregator measures of batches."""
    gaps = float(sum(run.missing.values()))
    observed = (1, gaps, gaps, gaps, about.now_s, 0, 0, 0, None)
    yield "ingest/gaps", "observation", (gaps, 0.0, *NOT_A_RATIO, *observed)
    counts = {"ingest/deltas": about.accepted, "ingest/duplicates": about.duplicates}
    counts |= {f"ingest/rejected/{reason}": number for reason, number in about.rejected.items()}
    for key, number in counts.items():
        if number:
            yield key, "count", (float(number), 0.0, *NOT_A_RATIO, *NOT_OBSERVED)
