"""The workers and the operator of the model of delivery, as generators of calls."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from services.common.queue import GROUP, NEXT

if TYPE_CHECKING:
    from tests.services.common.delivery_model import Model

MAX_DELIVERIES = 4

ALONE_AFTER = 2

MAX_HELD = 3

Steps = Generator["Call", Any, Any]


@dataclass
class Call:
    """A script with its keys and arguments, or ("", (), a plain command)."""

    script: str
    keys: tuple[str, ...]
    arguments: tuple[Any, ...]
    repeated: bool = False
    """An answer to it was lost before."""


@dataclass
class Held:
    """An entry in a worker's own table."""

    entry: str
    group: str
    data: str
    reason: str
    deliveries: int


class Worker:
    """A generator or a scorer: takes, works on up to three entries side by side, hands off."""

    def __init__(self, model: "Model", name: str, stage: str) -> None:
        self.model, self.name, self.stage = model, name, stage
        self.held: dict[str, Held] = {}
        self.alive = True
        self._results = 0
        keys = model.keys
        self._source: str = getattr(keys, stage)
        self._target: str = getattr(keys, NEXT[stage])

    def steps(self) -> Steps:
        """Its life."""
        chance = self.model.random
        while True:
            alone = any(h.deliveries > ALONE_AFTER for h in self.held.values())
            room = len(self.held) < MAX_HELD and not alone
            move = chance.random()
            if self.held and move < 0.5:
                yield from self._end_one(chance.choice(list(self.held.values())))
            elif self.held and move < 0.6:
                yield from self._renew()
            elif (move < 0.63 if self.held else move < 0.02) and not self.model.calm:
                yield from self._give_back()
                return
            elif room and move < 0.75:
                yield from self._take_over()
            elif room:
                yield from self._read()
            else:
                yield from self._renew()

    def _read(self) -> Steps:
        count = self.model.random.randint(1, MAX_HELD - len(self.held))
        command = ("XREADGROUP", "GROUP", GROUP, self.name, "COUNT", count, "STREAMS")
        found = yield Call("", (), (*command, self._source, ">"))
        entries = found[0][1] if found else []
        yield from self._begin([held_of(entry, fields, 1) for entry, fields in entries])

    def _take_over(self) -> Steps:
        page = yield Call("", (), ("XPENDING", self._source, GROUP, "-", "+", 100))
        for entry, consumer, _, deliveries in page or ():
            if entry in self.held or not self._seems_dead(consumer, entry):
                continue
            if deliveries >= ALONE_AFTER and self.held:
                continue
            command = ("XCLAIM", self._source, GROUP, self.name, 0, entry)
            found = yield Call("", (), command)
            live = [item for item in found or () if item and item[0] is not None]
            if not live:
                there = yield Call("", (), ("XRANGE", self._source, entry, entry))
                if not there:
                    yield Call("", (), ("XACK", self._source, GROUP, entry))
                continue
            self.model.told["takeovers"] += 1
            taken = held_of(live[0][0], live[0][1], deliveries + 1)
            if deliveries >= MAX_DELIVERIES:
                self.held[taken.entry] = taken
                yield from self._refuse(taken, "its worker died")
            else:
                yield from self._begin([taken])
            return

    def _seems_dead(self, consumer: str, entry: str) -> bool:
        """Idle for claim_after_s: whoever died, what was given back, and sometimes whoever is only
        slow."""
        holder = self.model.workers.get(consumer)
        if holder is None or not holder.alive or entry not in holder.held:
            return True
        return not self.model.calm and self.model.random.random() < 0.15

    def _begin(self, entries: list[Held]) -> Steps:
        if not entries:
            return
        for held in entries:
            self.held[held.entry] = held
        triples = [x for h in entries for x in (h.entry, h.deliveries, h.group)]
        keys = (self._source, self.model.keys.outstanding, self.model.keys.clock)
        version = "7" if self.stage == "requests" else ""
        _, words = yield Call("begin", keys, (self.name, version, "1", *triples))
        for held, word in zip(entries, words, strict=True):
            if word != "held":
                self.model.told[f"begin {word}"] += 1
                self.held.pop(held.entry, None)

    def _renew(self) -> Steps:
        pairs = [x for h in self.held.values() for x in (h.entry, h.deliveries)]
        entries = list(self.held)
        keys = (self._source, self.model.keys.clock)
        _, words = yield Call("renew", keys, (self.name, *pairs))
        for entry, word in zip(entries, words, strict=True):
            if word == "lost":
                self.model.told["renew lost"] += 1
                self.held.pop(entry, None)

    def _end_one(self, held: Held) -> Steps:
        chance = self.model.random.random()
        if chance < 0.09:
            yield from self._refuse(held, "does not parse")
        elif chance < 0.14:
            yield from self._hand_off(held, reason="failed")
        else:
            yield from self._hand_off(held, reason="")

    def _hand_off(self, held: Held, *, reason: str) -> Steps:
        from tests.services.common.delivery_model import CAPACITY

        keys = self.model.keys
        target = "samples" if reason else NEXT[self.stage]
        self._results += 1
        data = "" if reason else f"{self.name}#{self._results}"
        arguments = (
            *(self.name, held.entry, held.deliveries, held.group, 0 if reason else 1, data),
            *(0 if reason else CAPACITY, f"{target}:{self.name}:{held.deliveries}", "1", reason),
        )
        call_keys = (self._source, getattr(keys, target), keys.outstanding)
        answer = yield Call("hand_off", call_keys, arguments)
        self.model.told[f"hand_off {answer}"] += 1
        if answer == "full":
            return
        if answer == "done":
            self.model.accepted(self.stage, held, by=f"{self.name}/{held.deliveries}")
        self.held.pop(held.entry, None)

    def _refuse(self, held: Held, reason: str) -> Steps:
        keys = self.model.keys
        call_keys = (self._source, keys.dead, keys.samples, keys.outstanding, keys.clock)
        token = f"{self.stage}:{self.name}:{held.deliveries}"
        arguments = (
            *(self.name, held.entry, held.deliveries, held.group, reason, held.data),
            *(self.stage, 6, 60, "1", "1", token),
        )
        answer = yield Call("refuse", call_keys, arguments)
        self.model.told[f"refuse {answer}"] += 1
        if answer == "done":
            self.model.accepted(self.stage, held, by=f"{self.name}/{held.deliveries}")
        self.held.pop(held.entry, None)

    def _give_back(self) -> Steps:
        triples = [x for h in self.held.values() for x in (h.entry, h.deliveries, h.group)]
        self.held.clear()
        self.alive = False
        yield Call(
            "give_back", (self._source, self.model.keys.outstanding), (self.name, 1, *triples)
        )
        self.model.told["give_back ends"] += 1
        self.model.add_worker(self.stage)


def held_of(entry: str, fields: list[str] | None, deliveries: int) -> Held:
    """An entry as the server answers it; one without a body has no group."""
    flat = fields or []
    by_name = dict(zip(flat[::2], flat[1::2], strict=True))
    return Held(
        entry, by_name.get("id", ""), by_name.get("data", ""), by_name.get("reason", ""), deliveries
    )


def operate(model: "Model") -> Steps:
    """An operator looks at the dead letters and puts one back, or deletes one."""
    keys = model.keys
    _, letters = yield Call("letters", (keys.dead,), ("-", 100))
    if not letters:
        return
    # The tombstones of most others have been taken.
    letter = letters[-1] if model.random.random() < 0.7 else model.random.choice(letters)
    fields = dict(zip(letter[2::2], letter[3::2], strict=True))
    if model.random.random() < 0.2:
        yield Call("discard", (keys.dead, keys.clock), (letter[0],))
        return
    anew = model.random.random() < 0.4
    source = getattr(keys, fields["stream"])
    call_keys = (keys.dead, keys.samples, source, keys.outstanding, keys.clock)
    call = f"{letter[0]}/{model.random.random()}"
    answer = yield Call("requeue", call_keys, (letter[0], call, 1, "1" if anew else "0"))
    model.told[f"requeue {answer}"] += 1
    if answer == "done":
        model.told["requeued"] += 1
