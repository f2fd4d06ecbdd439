"""A stored run that is long: thousands of steps of as many keys as a rich recipe has.

It goes the way of any other, through Ingest and the roll-ups; only its batches are made of whole
columns, hundreds of steps each, since what is asked is how the page reads it.
"""

from collections.abc import Iterator
from itertools import count, pairwise

import numpy as np
from headrace.v1 import metrics_pb2 as wire
from sqlalchemy import select

from services.aggregator import schema
from services.aggregator.batch import decode
from services.aggregator.catalogue import CATALOGUE
from services.aggregator.ingest import Ingest
from services.aggregator.metric import Metric
from services.aggregator.rollup import roll_up
from services.aggregator.store import Store
from services.common.columns import DOUBLE, UINT32, UINT64
from tests.services.aggregator.making import event

STEP_S = 1.0
STEPS_A_BATCH = 250
BLOCKS_AT_ONCE = 640
KEYS = 150
STEPS = 10_000
EVENTS_OF = 40
"""Last steps whose groups are in the ledger."""
GROUPS = 32
"""Groups of a step."""

NOW_S = 1e6
"""The producers' own clock at the end, in seconds."""

LEVELS = {
    "perf/rollout_wait_s": 0.6,
    "perf/straggler_wait_s": 0.02,
    "perf/data_s": 0.02,
    "perf/fwd_bwd_s": 0.26,
    "perf/optimizer_s": 0.03,
    "perf/weight_sync_s": 0.03,
    "perf/checkpoint_s": 0.02,
    "perf/eval_s": 0.01,
    "perf/unaccounted_s": 0.01,
    "perf/step_s": STEP_S,
    "reward": 0.5,
    "batch/groups_per_step": GROUPS,
}
"""About what these are; the others are drawn."""


def long_keys(number: int = KEYS) -> dict[str, Metric]:
    """So many keys with their declarations: first those of the overview, then the catalogue's in
    its order, placeholders filled in."""
    found = {key: _declared(key) for key in LEVELS}
    for metric in CATALOGUE.metrics:
        found.setdefault(metric.key_for("one") if "{" in metric.key else metric.key, metric)
    for index in count():
        if len(found) >= number:
            break
        key = f"rewards/function-{index}"
        found[key] = _declared(key)
    return dict(list(found.items())[:number])


def _declared(key: str) -> Metric:
    found = CATALOGUE.find(key)
    assert found is not None, key
    return found.metric


def fill_long(
    store: Store,
    *,
    now_s: float,
    name: str = "long",
    steps: int = STEPS,
    keys: int = KEYS,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """A run of so many steps that ends at `now_s`, rolled up. Returns the values of each key, one
    a step: of a ratio its numerator over 1, of a count its sum.
    """
    ingest, random = Ingest(store), np.random.default_rng(seed)
    declared = long_keys(keys)
    values = {key: _curve(random, steps, LEVELS.get(key)) for key in declared}
    for sequence, first in enumerate(range(0, steps, STEPS_A_BATCH), start=1):
        last = min(steps, first + STEPS_A_BATCH)
        end_s = NOW_S - (steps - np.arange(first, last) - 1) * STEP_S
        for request in _batches(name, declared, values, np.arange(first, last), end_s):
            request.sequence = sequence
            if last == steps and request.service == "trainer":
                request.events.extend(_events(steps))
            behind_s = NOW_S - request.now_s
            receipt = ingest.take(decode(request), now_s=now_s - behind_s)
            assert not receipt.rejected, receipt.rejected[0]
    _roll_up(store)
    store.checkpoint()
    return values


def _roll_up(store: Store) -> None:
    """What Roller does, many blocks at once, since no batch waits: all but the newest of a lane."""
    table = schema.stale
    with store.rolling() as connection:
        assert connection is not None, "somebody else rolls up"
        order = (table.c.series_id, table.c.lane, table.c.block)
        stale = [tuple(row) for row in connection.execute(select(*order).order_by(*order))]
        due = [each for each, after in pairwise(stale) if each[:2] == after[:2]]
        for at in range(0, len(due), BLOCKS_AT_ONCE):
            roll_up(connection, due[at : at + BLOCKS_AT_ONCE])
    store.take_marked()


def _curve(random: np.random.Generator, steps: int, level: float | None) -> np.ndarray:
    """A trend with noise, never below 0."""
    base = float(random.uniform(0.1, 10)) if level is None else level
    trend = 1 + 0.3 * np.sin(np.arange(steps) / steps * float(random.uniform(2, 12)))
    wanders = 1.0 if level is not None and level >= 1 else trend
    return np.abs(base * (wanders + random.normal(0, 0.05, steps)))


def _batches(
    name: str,
    declared: dict[str, Metric],
    values: dict[str, np.ndarray],
    steps: np.ndarray,
    end_s: np.ndarray,
) -> Iterator[wire.PushDeltasRequest]:
    """One batch of each service for some steps."""
    for service in ("trainer", "scorer", "generator"):
        own = [key for key, metric in declared.items() if _service(metric) == service]
        request = wire.PushDeltasRequest(
            run=name,
            producer=f"{service}-0",
            service=service,
            boot_id="boot-1",
            now_s=float(end_s[-1]),
            keys=own,
        )
        for instrument in ("count", "ratio", "observation"):
            places = [at for at, key in enumerate(own) if declared[key].instrument == instrument]
            if places:
                found = np.concatenate([values[own[at]][steps] for at in places])
                _write(request, instrument, np.array(places), steps, end_s, found)
        yield request


def _service(metric: Metric) -> str:
    return next((each for each in metric.producers if each != "aggregator"), "trainer")


def _write(
    request: wire.PushDeltasRequest,
    instrument: str,
    places: np.ndarray,
    steps: np.ndarray,
    end_s: np.ndarray,
    values: np.ndarray,
) -> None:
    """The columns of one instrument, as services.common.columns writes them: key by key."""
    number = len(values)
    columns = getattr(request, f"{instrument}s")
    ends = np.tile(end_s, len(places))
    columns.places.key = np.repeat(places, len(steps)).astype(UINT32).tobytes()
    columns.places.attempt = np.ones(number, UINT64).tobytes()
    columns.places.step = np.tile(steps, len(places)).astype(UINT64).tobytes()
    columns.places.begin_s = (ends - STEP_S).astype(DOUBLE).tobytes()
    columns.places.end_s = ends.astype(DOUBLE).tobytes()
    taken = values.astype(DOUBLE).tobytes()
    if instrument == "count":
        columns.sum = taken
    elif instrument == "ratio":
        columns.numerator, columns.denominator = taken, np.ones(number, DOUBLE).tobytes()
    else:
        for column in ("sum", "min", "max", "last"):
            setattr(columns, column, taken)
        columns.n = np.ones(number, UINT64).tobytes()
        columns.last_s = ends.astype(DOUBLE).tobytes()
        for column in ("num_nan", "num_pos_inf", "num_neg_inf"):
            setattr(columns, column, np.zeros(number, UINT64).tobytes())
        columns.num_buckets = np.zeros(number, UINT32).tobytes()


def _events(steps: int) -> Iterator[wire.GroupEvent]:
    """Groups of the last steps, and those that are under way."""
    ago_s = NOW_S - 1000.0  # event() speaks of a clock that stands at 1,000 s
    for step in range(max(0, steps - EVENTS_OF), steps):
        age_s = (steps - 1 - step) * STEP_S
        for index in range(GROUPS):
            group = f"0.{step * GROUPS + index}.1.1"
            for state, before_s in (("dispatched", 6.0), ("generating", 5.0), ("scored", 1.0)):
                said = event(group, state, row_index=index, age_s=age_s + before_s)
                said.at_s += ago_s
                yield said
            said = event(group, "trained", row_index=index, age_s=age_s + 0.1, step=step)
            said.at_s += ago_s
            yield said
    for index in range(8):
        said = event(f"0.{steps * GROUPS + index}.1.1", "dispatched", row_index=index, age_s=0.5)
        said.at_s += ago_s
        yield said
