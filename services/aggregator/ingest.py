"""From batches to rows: checked against the catalogue, placed in time, named and committed at once.

The aggregator never asks a producer's clock what time it is: a delta that ended `now_s - end_s`
seconds before its batch was sent ended so long before the batch arrived, on the aggregator's own
clock (with PostgreSQL, the database's).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from services.aggregator.batch import Batch, Delta, Rejected
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
    Place,
    Run,
    boot_of,
    make_series,
    producer_of,
    source_of,
)
from services.aggregator.rows import LAST_AT_S, NOT_A_RATIO, NOT_OBSERVED, StoredRow, add
from services.aggregator.schema import BUCKET_S
from services.aggregator.store import Store, Writing
from services.aggregator.transaction import Changed, Transaction

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
        self, store: Store, *, catalogue: Catalogue = CATALOGUE, producer: str = "aggregator"
    ) -> None:
        self._store = store
        self._catalogue = catalogue
        self._producer = producer

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
                seen.rejected.update(each.reason for each in receipt.rejected)
                receipts.append(receipt)
            for name, each in about.items():
                self._record(writing, writing.run(name, now_s=each.now_s), each)
            writing.transaction.finish(now_s=max(each.now_s for each in about.values()))
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
        resolved: dict[tuple[str, Instrument], int | Rejected] = {}
        taken: list[Delta] = []
        for delta in batch.deltas:
            key, attempt, step, _, end_s, instrument, row = delta
            known = run.series.get(key)
            series_id: int | Rejected
            if known is not None and known[1] == instrument:
                series_id = known[0]
            else:
                named = (key, instrument)
                if named not in resolved:
                    resolved[named] = self._series(writing, run, key, instrument)
                series_id = resolved[named]
                if isinstance(series_id, Rejected):
                    rejected.append(series_id)
                    continue
            taken.append(delta)
            if row[LAST_AT_S] is not None:
                row[LAST_AT_S] += shift_s
            place = (series_id, attempt, step, source_id, math.floor((end_s + shift_s) / BUCKET_S))
            _add(transaction, run, changed, place, row)
        for attempt, seen in _attempts(taken, shift_s).items():
            known_seen = changed.attempts.get(attempt)
            changed.attempts[attempt] = seen if known_seen is None else known_seen.widened(seen)
        first_s = min((delta.begin_s for delta in taken), default=batch.now_s) + shift_s
        _see(changed, producer_id, first_s, now_s)
        if batch.events:
            transaction.add_events(run, ((e, e.at_s + shift_s) for e in batch.events))
        return Receipt(accepted=len(taken), duplicate=False, rejected=tuple(rejected))

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
            _add(writing.transaction, run, changed, place, row)
        seen = Attempt(step, step, now_s, now_s)
        known = changed.attempts.get(attempt)
        changed.attempts[attempt] = seen if known is None else known.widened(seen)
        _see(changed, producer_id, now_s, now_s)


def _add(
    transaction: Transaction, run: Run, changed: Changed, place: Place, row: StoredRow
) -> None:
    """Add to the row of a place. Whoever calls has seen that the instruments are the same."""
    held = changed.rows.get(place)
    if held is None:
        series_id, attempt, step, _, bucket = place
        changed.touched[attempt, step, bucket].add(series_id)
        held = transaction.row(run, place)
        changed.rows[place] = row if held is None else held
        if held is None:
            return
    add(held, row)


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


def _attempts(deltas: Iterable[Delta], shift_s: float) -> dict[int, Attempt]:
    """By attempt, the steps and times of some deltas."""
    by_attempt: defaultdict[int, list[Delta]] = defaultdict(list)
    for delta in deltas:
        by_attempt[delta[1]].append(delta)
    return {
        attempt: Attempt(
            first_step=min(delta[2] for delta in found),
            last_step=max(delta[2] for delta in found),
            first_s=min(delta[3] for delta in found) + shift_s,
            last_s=max(delta[4] for delta in found) + shift_s,
        )
        for attempt, found in by_attempt.items()
    }


def _own(run: Run, about: _About) -> Iterable[tuple[str, Instrument, StoredRow]]:
    """What the aggregator measures of batches."""
    gaps = float(sum(run.missing.values()))
    observed = [1, gaps, gaps, gaps, about.now_s, 0, 0, 0, None]
    yield "ingest/gaps", "observation", [gaps, 0.0, *NOT_A_RATIO, *observed]
    counts = {"ingest/deltas": about.accepted, "ingest/duplicates": about.duplicates}
    counts |= {f"ingest/rejected/{reason}": number for reason, number in about.rejected.items()}
    for key, number in counts.items():
        if number:
            yield key, "count", [float(number), 0.0, *NOT_A_RATIO, *NOT_OBSERVED]
