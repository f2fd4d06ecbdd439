"""From a batch to rows: checked against the catalogue, placed in time, named and committed at once.

The aggregator never asks a producer's clock what time it is: a delta that ended `now_s - end_s`
seconds before its batch was sent ended so long before the batch arrived, on the aggregator's own
clock.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from services.aggregator.batch import Batch, Delta, Rejected
from services.aggregator.catalogue import CATALOGUE
from services.aggregator.histogram import Histogram
from services.aggregator.metric import (
    CUSTOM_PREFIX,
    MAX_PLACEHOLDER_VALUES,
    OTHER,
    Catalogue,
    Metric,
)
from services.aggregator.reduce import (
    INSTRUMENT_OF,
    Count,
    Instrument,
    Observation,
    Partial,
    Sum,
    merge,
)
from services.aggregator.schema import BUCKET_S
from services.aggregator.store import Store
from services.aggregator.transaction import Attempt, Place, Run, Transaction
from services.common.partials import LOG_GAMMA

CUSTOM = CUSTOM_PREFIX + "{name}"
"""What custom keys count as, in the bound on series."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of a batch."""

    accepted: int
    duplicate: bool
    rejected: tuple[Rejected, ...]


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
        shift_s = now_s - batch.now_s
        first_s = min((d.begin_s + shift_s for d in batch.deltas), default=now_s)
        last_s = max((d.end_s + shift_s for d in batch.deltas), default=now_s)
        with self._store.write() as transaction:
            run = transaction.run(batch.run, first_s=first_s, last_s=last_s)
            producer_id = transaction.producer(
                run, batch.producer, service=batch.service, first_s=first_s, last_s=now_s
            )
            if not transaction.claim(run, producer_id, batch.boot_id, batch.sequence):
                self._record(transaction, run, now_s, {"ingest/duplicates": Count(Sum(1.0))})
                return Receipt(accepted=0, duplicate=True, rejected=())
            placed: dict[Place, Partial] = {}
            rejected = list(batch.rejected)
            taken: list[Delta] = []
            for delta in batch.deltas:
                series_id = self._series(transaction, run, delta.key, delta.partial)
                if isinstance(series_id, Rejected):
                    rejected.append(series_id)
                    continue
                taken.append(delta)
                bucket = math.floor((delta.end_s + shift_s) / BUCKET_S)
                place = Place(series_id, delta.attempt, delta.step, producer_id, bucket)
                partial = _on_our_clock(delta.partial, shift_s)
                held = placed.get(place)
                placed[place] = partial if held is None else merge(held, partial)
            for attempt, seen in _attempts(taken, shift_s).items():
                transaction.note_attempt(run, attempt, seen)
            transaction.add(run, placed)
            transaction.add_events(run, ((e, e.at_s + shift_s) for e in batch.events))
            self._record(transaction, run, now_s, _about(run, now_s, len(taken), rejected))
        return Receipt(accepted=len(taken), duplicate=False, rejected=tuple(rejected))

    def _series(
        self, transaction: Transaction, run: Run, key: str, partial: Partial
    ) -> int | Rejected:
        """The series that a key belongs to, or why it has none."""
        instrument = INSTRUMENT_OF[type(partial)]
        found = self._catalogue.find(key)
        if found is not None:
            metric, declared = found.metric, found.metric.key
            if metric.instrument != instrument:
                return _wrong_instrument(key, declared=metric.instrument, sent=instrument)
            if found.value is not None:
                key = _bounded(run, key, declared, metric)
        elif key.startswith(CUSTOM_PREFIX) and key != CUSTOM_PREFIX:
            declared = CUSTOM
            key = _bounded(run, key, CUSTOM, None)
        else:
            return Rejected(
                key,
                "unknown_key",
                f"not in the catalogue; declare it, or record it as {CUSTOM_PREFIX}NAME",
            )
        series_id = transaction.series(run, key, declared=declared, instrument=instrument)
        if series_id is None:
            held = run.series[key][1]
            return _wrong_instrument(key, declared=held, sent=instrument)
        return series_id

    def _record(
        self, transaction: Transaction, run: Run, now_s: float, partials: dict[str, Partial]
    ) -> None:
        """Add the aggregator's own metrics, at the run's present attempt and step."""
        producer_id = transaction.producer(
            run, self._producer, service="aggregator", first_s=now_s, last_s=now_s
        )
        attempt, step = run.clock
        transaction.note_attempt(run, attempt, Attempt(step, step, now_s, now_s))
        bucket = math.floor(now_s / BUCKET_S)
        placed = {}
        for key, partial in partials.items():
            series_id = self._series(transaction, run, key, partial)
            assert not isinstance(series_id, Rejected), series_id
            placed[Place(series_id, attempt, step, producer_id, bucket)] = partial
        transaction.add(run, placed)


def _bounded(run: Run, key: str, declared: str, metric: Metric | None) -> str:
    """The key itself, or `other` when its placeholder has too many values already."""
    if key in run.series or run.declared[declared] < MAX_PLACEHOLDER_VALUES:
        return key
    return CUSTOM_PREFIX + OTHER if metric is None else metric.key_for(OTHER)


def _wrong_instrument(key: str, *, declared: Instrument, sent: Instrument) -> Rejected:
    return Rejected(key, "wrong_instrument", f"declared as {declared}, sent as {sent}")


def _on_our_clock(partial: Partial, shift_s: float) -> Partial:
    if isinstance(partial, Observation) and partial.last is not None:
        return replace(partial, last_at_s=partial.last_at_s + shift_s)
    return partial


def _attempts(deltas: Iterable[Delta], shift_s: float) -> dict[int, Attempt]:
    """By attempt, the steps and times of some deltas."""
    seen: dict[int, Attempt] = {}
    for delta in deltas:
        begin_s, end_s = delta.begin_s + shift_s, delta.end_s + shift_s
        known = seen.get(delta.attempt)
        if known is None:
            seen[delta.attempt] = Attempt(delta.step, delta.step, begin_s, end_s)
            continue
        known.first_step = min(known.first_step, delta.step)
        known.last_step = max(known.last_step, delta.step)
        known.first_s, known.last_s = min(known.first_s, begin_s), max(known.last_s, end_s)
    return seen


def _about(
    run: Run, now_s: float, accepted: int, rejected: Iterable[Rejected]
) -> dict[str, Partial]:
    """What the aggregator measures of a batch."""
    partials: dict[str, Partial] = {"ingest/gaps": _observed(run.missing_batches, now_s)}
    if accepted:
        partials["ingest/deltas"] = Count(Sum(float(accepted)))
    for reason, number in Counter(each.reason for each in rejected).items():
        partials[f"ingest/rejected/{reason}"] = Count(Sum(float(number)))
    return partials


def _observed(value: int, now_s: float) -> Observation:
    """One observation of a number that is not negative."""
    number = float(value)
    if value == 0:
        histogram = Histogram(zeros=1)
    else:
        histogram = Histogram(positive={math.ceil(math.log(number) / LOG_GAMMA): 1})
    return Observation(1, Sum(number), number, number, number, now_s, histogram)
