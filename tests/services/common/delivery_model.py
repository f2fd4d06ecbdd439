"""A model of a run on the scripts alone: trainer, workers and operator as coroutines, a random
scheduler, and a real queue server.

Each party is a generator that yields the calls it makes and is sent their answers. The scheduler
picks whose call is next; it may make it and lose the answer (the call is made again later, with
whatever happened between), or end the party before or after it. There is no clock: a claim may be
taken over at any moment, so that every worker may turn out to be a zombie at its next call. After
every call the whole state of the server is compared with what the rules promise.
"""

import json
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import redis

from services.common.queue import GROUP, SCRIPTS, Keys
from tests.services.common.delivery_parties import Call, Held, Steps, Worker, operate
from tests.services.common.delivery_trainer import Trainer, TrainerModel

STREAMS = ("requests", "groups", "samples")

CAPACITY = 3
"""Groups that may wait in `groups` and in `samples`."""

CHAOS_CALLS = 110
"""Calls with faults; then the run goes on to its end without any."""

CALM_CALLS = 4000
"""A run that needs more calls to its end is stuck."""

SNAPSHOT = """
local answer = {streams = {}, pending = {}, outstanding = {}, dead = {}}
for i = 1, 3 do
  local entries = {}
  for _, entry in ipairs(redis.call('XRANGE', KEYS[i], '-', '+')) do
    local field = {}
    for j = 1, #entry[2], 2 do field[entry[2][j]] = entry[2][j + 1] end
    entries[#entries + 1] = {entry[1], field.id, field.reason or '', field.data or ''}
  end
  answer.streams[i] = entries
  local pending = redis.pcall('XPENDING', KEYS[i], 'hr', '-', '+', 1000)
  answer.pending[i] = pending.err and {} or pending
end
local hash = redis.call('HGETALL', KEYS[4])
for i = 1, #hash, 2 do answer.outstanding[#answer.outstanding + 1] = {hash[i], hash[i + 1]} end
local clock = redis.call('HMGET', KEYS[5], 'attempt', 'state', 'dead_bytes')
answer.clock = {clock[1] or '0', clock[2] or '', clock[3] or '0'}
for _, entry in ipairs(redis.call('XRANGE', KEYS[6], '-', '+')) do
  answer.dead[#answer.dead + 1] = {entry[1], #entry[2][#entry[2]]}
end
return cjson.encode(answer)
"""


class Broken(AssertionError):
    """A rule that does not hold; the message has the seed and the calls that led to it."""


@dataclass
class State:
    """What the server holds, after one call."""

    streams: dict[str, list[tuple[str, str, str, str]]]
    """By stream: (entry, group, reason, data)."""
    pending: dict[str, dict[str, tuple[str, int]]]
    """By stream: entry -> (consumer, deliveries)."""
    outstanding: dict[str, str]
    attempt: int
    run_state: str
    dead_bytes: int
    letters: dict[str, int]


@dataclass
class Party:
    """One process of the model."""

    name: str
    steps: Steps
    call: Call
    stalled: int = 0
    """Turns that it stays stopped (SIGSTOP)."""


class Server:
    """A connection that answers as the server does, and the scripts that it has loaded."""

    def __init__(self, url: str, *, scripts: Mapping[str, str] = SCRIPTS) -> None:
        self.client = cast(Any, redis.Redis.from_url(url, protocol=2))
        self.client.response_callbacks.clear()
        self.sha: dict[str, str] = {
            name: self.client.script_load(text).decode()
            for name, text in {**scripts, "snapshot": SNAPSHOT}.items()
        }


class Model:
    """One schedule, by its seed."""

    def __init__(self, server: Server, seed: int, *, data_loss: bool) -> None:
        self.random = random.Random(seed)
        self.seed, self.told = seed, Counter[str]()
        self.client, self._sha = server.client, server.sha
        self.data_loss = data_loss
        self.lost_data = False
        self.keys = Keys(f"model-{seed}")
        self.trace: list[str] = []
        self.parties: dict[str, Party] = {}
        self.workers: dict[str, Worker] = {}
        self.before: dict[str, str] | None = {}
        self.calm = False
        self.trainer = TrainerModel(self)
        self.done_by: dict[tuple[str, str], str] = {}
        self._names = 0
        self._backup: dict[str, bytes] | None = None

    # -- the schedule

    def run(self) -> None:
        """From the first start of the trainer to the end of the run. Raises Broken."""
        self._create_groups()
        try:
            for stage in ("requests", "requests", "groups", "groups"):
                self.add_worker(stage)
            self.start_trainer()
            for _ in range(CHAOS_CALLS):
                self._fault()
                self._turn()
                if self.trainer.finished:
                    break
            self.calm = True
            for _ in range(CALM_CALLS):
                self._turn()
                if self.trainer.finished and self._drained():
                    break
            else:
                self.fail("the run is stuck")
            self._check_end()
        finally:
            self.client.unlink(*self.client.keys(f"hr:{{{self.keys.run}}}:*") or ["none"])

    def add_worker(self, stage: str) -> None:
        """A worker process starts."""
        self._names += 1
        worker = Worker(self, f"{stage[0]}{self._names}", stage)
        self.workers[worker.name] = worker
        self.add(worker.name, worker.steps())

    def start_trainer(self) -> None:
        """A trainer process starts; the one before it may still be there, stopped."""
        self._names += 1
        name = f"t{self._names}"
        self.add(name, Trainer(self.trainer, name).steps())

    def add(self, name: str, steps: Steps) -> None:
        """A party begins."""
        try:
            self.parties[name] = Party(name, steps, next(steps))
        except StopIteration:
            return

    def _turn(self) -> None:
        """The call of one party."""
        if not self.trainer.finished and not any(name[0] == "t" for name in self.parties):
            self.start_trainer()
        able = [party for party in self.parties.values() if not party.stalled or self.calm]
        for party in self.parties.values():
            party.stalled = max(0, party.stalled - 1)
        if not able:
            return
        party = self.random.choice(able)
        answer = self._make(party)
        if not self.calm and self.random.random() < 0.1:
            self.told["lost answers"] += 1
            party.call.repeated = True
            return
        try:
            party.call = party.steps.send(answer)
        except StopIteration:
            self.parties.pop(party.name, None)

    def _make(self, party: Party) -> Any:
        call = party.call
        pipe = self.client.pipeline(transaction=False)
        if call.script:
            pipe.execute_command(
                "EVALSHA", self._sha[call.script], len(call.keys), *call.keys, *call.arguments
            )
        else:
            pipe.execute_command(*call.arguments)
        keys = self.keys
        pipe.execute_command(
            "EVALSHA",
            self._sha["snapshot"],
            6,
            *(getattr(keys, name) for name in (*STREAMS, "outstanding", "clock", "dead")),
        )
        answer, snapshot = pipe.execute(raise_on_error=False)
        words = [call.script or call.arguments[0], *map(str, call.arguments)]
        self.trace.append(f"{party.name}: {' '.join(words)[:400]} -> {str(answer)[:400]}")
        if isinstance(answer, redis.ResponseError):
            if not str(answer).startswith("NOGROUP"):
                self.fail(f"the server refuses: {answer}")
            self._create_groups()
            answer = None
        if isinstance(snapshot, Exception):
            self.fail(f"no snapshot: {snapshot}")
        self.told["calls"] += 1
        self._check(self._state(snapshot), call)
        return _text(answer)

    # -- faults

    def _fault(self) -> None:
        chance = self.random.random()
        workers = [party for party in self.parties.values() if party.name in self.workers]
        if chance < 0.03 and workers:
            self._end_worker(self.random.choice(workers).name)
        elif chance < 0.06 and workers:
            self.told["stalls"] += 1
            self.random.choice(workers).stalled = self.random.randint(5, 40)
        elif chance < 0.09:
            self.told["trainer kills"] += 1
            self._kill_trainers()
            self.start_trainer()
        elif chance < 0.1:
            self.told["second trainers"] += 1
            self.start_trainer()
        elif chance < 0.17 and "operator" not in self.parties:
            self.add("operator", operate(self))
        elif self.data_loss and chance < 0.18:
            self._save() if self._backup is None else self._roll_back()
        elif self.data_loss and chance < 0.182:
            self._lose_everything()

    def _end_worker(self, name: str) -> None:
        """SIGKILL, before or after its present call, and a new one in its place."""
        self.told["worker kills"] += 1
        party = self.parties.pop(name)
        if self.random.random() < 0.5:
            self._make(party)
        party.steps.close()
        self.workers[name].alive = False
        self.add_worker(self.workers[name].stage)

    def _kill_trainers(self) -> None:
        """End all trainers, each before or after its present call."""
        for name in [name for name in self.parties if name[0] == "t"]:
            party = self.parties.pop(name)
            if self.random.random() < 0.3:
                self._make(party)
            party.steps.close()

    def _save(self) -> None:
        """What a replica that lags, or a file that was synced a second ago, holds."""
        keys = [key.decode() for key in self.client.keys(f"hr:{{{self.keys.run}}}:*")]
        self._backup = {key: self.client.dump(key) for key in keys}

    def _roll_back(self) -> None:
        """The server comes back with what it held before."""
        assert self._backup is not None
        self.told["rollbacks"] += 1
        self.trace.append("-- the server is rolled back")
        self.lost_data = True
        self.client.unlink(*self.client.keys(f"hr:{{{self.keys.run}}}:*") or ["none"])
        for key, value in self._backup.items():
            self.client.restore(key, 0, value, replace=True)
        self._backup = None
        self._after_outage()

    def _lose_everything(self) -> None:
        self.told["empty restarts"] += 1
        self.trace.append("-- the server comes back empty")
        self.lost_data = True
        self.client.unlink(*self.client.keys(f"hr:{{{self.keys.run}}}:*") or ["none"])
        self._backup = None
        self._create_groups()
        self._after_outage()

    def _after_outage(self) -> None:
        """All see that the server was away: the trainer compares its memory with the server's."""
        self.trainer.outages += 1
        self.before = None

    def _create_groups(self) -> None:
        for name in STREAMS:
            try:
                self.client.xgroup_create(getattr(self.keys, name), GROUP, id="0", mkstream=True)
            except redis.ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):
                    raise

    # -- what must hold

    def _state(self, snapshot: bytes) -> State:
        found = json.loads(snapshot)
        # An empty table of Lua is an object in JSON.
        streams = {
            name: [tuple(entry) for entry in entries or ()]
            for name, entries in zip(STREAMS, found["streams"], strict=True)
        }
        pending = {
            name: {entry: (consumer, count) for entry, consumer, _, count in rows or ()}
            for name, rows in zip(STREAMS, found["pending"], strict=True)
        }
        attempt, run_state, dead_bytes = found["clock"]
        return State(
            streams=streams,
            pending=pending,
            outstanding=dict(found["outstanding"] or ()),
            attempt=int(attempt),
            run_state=run_state,
            dead_bytes=int(dead_bytes),
            letters=dict(found["dead"] or ()),
        )

    def _check(self, state: State, call: Call) -> None:
        """The server alone: each outstanding group is at one place, and at the one that is written
        down; only a dispatch adds one, and only a settlement or the end takes one away."""
        self.state = state
        if self.before is not None:
            added = set(state.outstanding) - set(self.before)
            gone = set(self.before) - set(state.outstanding)
            if added and call.script != "dispatch":
                self.fail(f"{call.script} added {added}")
            settled = set(call.arguments) if call.script == "settle" else gone
            if gone and (call.script not in ("settle", "finish") or not gone <= settled):
                self.fail(f"{call.script} took {gone} away")
        self.before = state.outstanding
        where: dict[str, list[tuple[str, str]]] = {}
        for stream, entries in state.streams.items():
            for _, group, reason, _ in entries:
                where.setdefault(group, []).append((stream, reason))
            ids = {entry for entry, *_ in entries}
            if not set(state.pending[stream]) <= ids:
                self.fail(f"{stream}: something is pending that is not there")
        for group, place in state.outstanding.items():
            places = where.get(group, [])
            if len(places) != 1:
                self.fail(f"{group} is outstanding and at {len(places)} places: {places}")
            [(stream, reason)] = places
            stage = place.split(":")[0]
            # A stage that refuses leaves its own name with the tombstone.
            if stage != stream and not (stream == "samples" and reason == "poison"):
                self.fail(f"{group} is in {stream}, its place says {place}")
        for stream in ("groups", "samples"):
            waiting = [e for e in state.streams[stream] if e[0] not in state.pending[stream]]
            limit = CAPACITY if not self.told["requeued"] else 1000
            if len([e for e in waiting if not e[2]]) > limit:
                self.fail(f"{stream}: more entries wait than its capacity")
        if state.dead_bytes != sum(state.letters.values()):
            self.fail(f"dead letters: {state.dead_bytes} bytes counted, {state.letters}")

    def accepted(self, stage: str, held: Held, *, by: str) -> None:
        """A worker was told `done` of an entry: nobody else may have been."""
        before = self.done_by.setdefault((stage, held.entry), by)
        if before != by and not self.lost_data:
            self.fail(f"{stage} {held.entry} was ended twice: by {before} and by {by}")

    def _drained(self) -> bool:
        return not any(self.state.streams.values()) and not self.state.outstanding

    def _check_end(self) -> None:
        if any(self.state.pending.values()):
            self.fail("something is pending in a drained run")
        self.trainer.check_end()

    def fail(self, why: str) -> None:
        """Raise Broken with all that led here."""
        raise Broken("\n".join([f"seed {self.seed}: {why}", *self.trace]))


def _text(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, list):
        return [_text(item) for item in value]
    return value
