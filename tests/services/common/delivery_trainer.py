"""The trainer of the model of delivery: what it remembers, what its checkpoint remembers, and what
it calls.

Nothing is computed: "training" a prompt puts it into the set of what these weights have learned
from, which a checkpoint copies and a new start restores.
"""

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from services.common.queue import GROUP
from tests.services.common.delivery_parties import Call, Steps, held_of

if TYPE_CHECKING:
    from tests.services.common.delivery_model import Model

NUM_PROMPTS, GROUPS_PER_STEP, MAX_OUTSTANDING = 8, 2, 5

MAX_TRIES = 3


class Ended(Exception):
    """This trainer ends: fenced, or the queue server has lost what it held."""


@dataclass
class Learned:
    """What a checkpoint holds: the prompts that its weights were trained on, and the book."""

    trained: set[int] = field(default_factory=set)
    given_up: set[int] = field(default_factory=set)
    failures: Counter[int] = field(default_factory=Counter)

    @property
    def remaining(self) -> int:
        """Prompts that this line of weights still needs."""
        return NUM_PROMPTS - len(self.trained | self.given_up)


class TrainerModel:
    """What outlives a trainer's process."""

    def __init__(self, model: "Model") -> None:
        self.model = model
        self.checkpoint = Learned()
        self.floor = 1
        self.finished = False
        self.outages = 0

    def check_end(self) -> None:
        """Every prompt trained, or given up; twice is seen where it happens."""
        left = set(range(NUM_PROMPTS)) - self.checkpoint.trained - self.checkpoint.given_up
        if left or self.checkpoint.trained & self.checkpoint.given_up:
            self.model.fail(f"prompts neither trained nor given up, or both: {left}")


class Trainer:
    """One process, one attempt."""

    def __init__(self, book: TrainerModel, name: str) -> None:
        self.book, self.model, self.name = book, book.model, name
        self.attempt = 0
        self.learned = Learned()
        self.outstanding: dict[str, int] = {}
        self.admitted: dict[str, str] = {}
        """Group -> entry, of the open step."""
        self._dispatching: set[str] = set()
        self._taken: set[str] = set()
        self._gone: set[str] = set()
        """Entries that the server may have lost with its data."""
        self._due: list[int] = []
        self._dispatches: Counter[int] = Counter()
        self._look_back = True
        self._outages = book.outages
        self._settles = 0
        self._over = False

    def steps(self) -> Steps:
        """Its life: start, steps, the end."""
        try:
            if not (yield from self._start()):
                self.book.finished = True
                return
            self.model.add(f"{self.name}d", self._dispatch())
            while self.learned.remaining:
                yield from self._move()
            yield from self._end()
        except Ended:
            self.model.told["trainers ended"] += 1
        finally:
            self._over = True

    def _start(self) -> Steps:
        keys = self.model.keys
        call_keys = (keys.clock, keys.samples, keys.outstanding)
        arguments = (self.book.floor, "recipe", 0, "")
        attempt, state, _, places, word = yield Call("start", call_keys, arguments)
        if word == "refused":
            assert state == "done", state
            return False
        self.attempt = attempt
        self.book.floor = max(self.book.floor, attempt + 1)
        self.learned = deepcopy(self.book.checkpoint)
        yield from self._adopt(places[::2])
        outstanding = set(self.outstanding.values())
        self._due = [p for p in range(NUM_PROMPTS) if not self._done(p) and p not in outstanding]
        self.model.random.shuffle(self._due)
        return True

    def _adopt(self, groups: list[str]) -> Steps:
        """Groups that only the server knows: this trainer's now, or duplicates."""
        duplicates = []
        for group in groups:
            prompt = int(group.split(".")[1])
            if self._done(prompt) or prompt in self.outstanding.values():
                duplicates.append(group)
                continue
            self.model.told["adopted"] += 1
            self.outstanding[group] = prompt
            if prompt in self._due:
                self._due.remove(prompt)
        if duplicates:
            self.model.told["duplicates"] += len(duplicates)
            yield from self._settle([("", group) for group in duplicates])

    def _done(self, prompt: int) -> bool:
        return prompt in self.learned.trained or prompt in self.learned.given_up

    def _dispatch(self) -> Steps:
        keys = self.model.keys
        while not self._over:
            bound = min(MAX_OUTSTANDING, self.learned.remaining)
            if not self._due or len(self.outstanding) >= bound:
                yield Call("", (), ("PING",))
                continue
            prompt = self._due.pop(0)
            group = f"0.{prompt}.{self.attempt}.{self._dispatches[prompt]}"
            self._dispatches[prompt] += 1
            self.outstanding[group] = prompt
            self._dispatching.add(group)
            call_keys = (keys.clock, keys.outstanding, keys.requests)
            try:
                yield from self._call("dispatch", call_keys, (group, "request", "1"))
            except Ended:
                return
            self._dispatching.discard(group)

    def _move(self) -> Steps:
        chance = self.model.random.random()
        if self._outages != self.book.outages or chance < 0.05:
            if self._outages != self.book.outages:
                self._look_back = True
            self._outages = self.book.outages
            yield from self._reconcile()
        elif chance < 0.15:
            self.book.checkpoint = deepcopy(self.learned)
            self.model.told["checkpoints"] += 1
        elif chance < 0.2 and self.outstanding and not self.model.calm:
            yield from self._forget(self.model.random.choice(list(self.outstanding)))
        elif len(self.admitted) >= min(GROUPS_PER_STEP, self.learned.remaining):
            yield from self._train()
        else:
            yield from self._take()

    def _take(self) -> Steps:
        limit = max(1, GROUPS_PER_STEP - len(self.admitted))
        read = ("XREADGROUP", "GROUP", GROUP, f"trainer-{self.attempt}", "COUNT", limit, "STREAMS")
        samples = self.model.keys.samples
        again = self._look_back
        if again:
            self._look_back = False
            found = yield Call("", (), (*read[:4], "STREAMS", samples, "0"))
        else:
            call = Call("", (), (*read, samples, ">"))
            found = yield call
            # What an answer brought that was lost is this trainer's, and no read of new ones brings
            # it again.
            self._look_back |= call.repeated
            if not found:
                keys = self.model.keys
                num, repeated = yield from self._call("reclaim", (keys.clock, keys.samples), ())
                self._look_back |= num != 0 or repeated
        entries = [held_of(entry, fields, 1) for entry, fields in found[0][1]] if found else []
        fresh = [each for each in entries if not again or each.entry not in self._taken]
        self._taken |= {each.entry for each in fresh}
        self._gone -= {each.entry for each in entries}  # they are there after all
        mine = []
        for each in fresh:
            ours = each.group in self.outstanding and each.group not in self.admitted
            mine.append(ours)
            if each.group in self.outstanding:
                # A group is at one place: one that is held and comes again was put back by a server
                # that went back, and the entry held before is no more.
                self.admitted[each.group] = each.entry
        for each, ours in zip(fresh, mine, strict=True):
            if each.group in self.outstanding and not ours:
                self.model.told["came again"] += 1
                continue
            if not ours:
                self.model.told["discarded"] += 1
                yield from self._settle([(each.entry, each.group)])
                continue
            chance = self.model.random.random()
            if each.reason in ("failed", "poison"):
                yield from self._drop(each.group, failed=True)
            elif each.reason or chance < 0.06:
                yield from self._drop(each.group, failed=False)
            elif chance < 0.08:
                yield from self._bury(each.entry, each.group, each.data)
                yield from self._drop(each.group, failed=True)

    def _drop(self, group: str, *, failed: bool) -> Steps:
        yield from self._settle([(self.admitted[group], group)])
        self.admitted.pop(group)
        prompt = self.outstanding.pop(group)
        self.learned.failures[prompt] += failed
        if self.learned.failures[prompt] >= MAX_TRIES:
            self.learned.given_up.add(prompt)
            self.model.told["given up"] += 1
        else:
            self._due.append(prompt)

    def _forget(self, group: str) -> Steps:
        """Drop a group wherever it is; whoever works on it is told `void`."""
        if group in self._dispatching or group in self.admitted:
            return
        yield from self._settle([("", group)])
        self._due.append(self.outstanding.pop(group))

    def _bury(self, entry: str, group: str, data: str) -> Steps:
        keys = self.model.keys
        arguments = (f"trainer-{self.attempt}", entry, group, "bad", data, 6, 60)
        yield from self._call("bury", (keys.samples, keys.dead, keys.clock), arguments)

    def _train(self) -> Steps:
        """One step, settled afterwards; a checkpoint may be written before or after that."""
        groups = list(self.admitted)
        for group in groups:
            prompt = self.outstanding[group]
            if prompt in self.learned.trained:
                self.model.fail(f"prompt {prompt} is trained twice in this line of weights")
            self.learned.trained.add(prompt)
        if self.model.random.random() < 0.4:
            self.book.checkpoint = deepcopy(self.learned)
        yield from self._settle([(self.admitted[group], group) for group in groups])
        self.model.told["trained"] += len(groups)
        for group in groups:
            self.admitted.pop(group)
            self.outstanding.pop(group)

    def _settle(self, pairs: list[tuple[str, str]]) -> Steps:
        keys = self.model.keys
        self._settles += 1
        name = f"{self.name}/{self._settles}"

        def arguments() -> tuple[Any, ...]:
            named = [("" if entry in self._gone else entry, group) for entry, group in pairs]
            return (self._settles, name, *(text for pair in named for text in pair))

        call_keys = (keys.clock, keys.samples, keys.outstanding)
        answer, _ = yield from self._call("settle", call_keys, arguments)
        self._taken -= {entry for entry, _ in pairs}
        self._gone -= {entry for entry, _ in pairs}
        if answer == "lost":
            if not self.model.lost_data:
                self.model.fail("an entry that the trainer held is gone")
            raise Ended

    def _call(
        self,
        script: str,
        keys: tuple[str, ...],
        arguments: tuple[Any, ...] | Callable[[], tuple[Any, ...]],
    ) -> Steps:
        """The answer to a script, and whether one was lost; again once a server that has lost this
        attempt knows it. Raises Ended when a newer one has begun."""
        repeated = False
        while True:
            values = arguments() if callable(arguments) else arguments
            call = Call(script, keys, (self.attempt, *values))
            answer = yield call
            repeated |= call.repeated
            if answer == "fenced":
                if self.model.state.attempt <= self.attempt:
                    self.model.fail(f"{self.attempt} is fenced by {self.model.state.attempt}")
                raise Ended
            if answer == "already" and not repeated:
                self.model.fail(f"{arguments} was dispatched before")
            if answer != "forgotten":
                return answer, repeated
            self.model.told["forgotten"] += 1
            if not self.model.lost_data:
                self.model.fail(f"attempt {self.attempt} is forgotten")
            self._gone |= self._taken
            self.book.outages += 1
            remember = ("remember", (self.model.keys.clock,), (self.attempt, "recipe", 0))
            if (yield Call(*remember)) == "fenced":
                raise Ended

    def _reconcile(self) -> Steps:
        before = set(self.outstanding) - self._dispatching - set(self.admitted)
        flat = yield Call("", (), ("HGETALL", self.model.keys.outstanding))
        there = set(flat[::2])
        for group in before - there:
            self.model.told["lost"] += 1
            # One that was replaced, and does not know it yet, misses what the new one settled.
            if not self.model.lost_data and self.model.state.attempt == self.attempt:
                self.model.fail(f"{group} is lost")
            self._due.append(self.outstanding.pop(group))
        strangers = there - set(self.outstanding) - self._dispatching
        yield from self._adopt(sorted(strangers))

    def _end(self) -> Steps:
        """What is left is dropped, and the streams drain by themselves before the run is declared
        done."""
        self.book.checkpoint = deepcopy(self.learned)
        left = list(self.outstanding)
        yield from self._settle([(self.admitted.pop(group, ""), group) for group in left])
        self.outstanding.clear()
        while any(self.model.state.streams.values()) or self.model.state.outstanding:
            if self.model.random.random() < 0.2:
                yield from self._reconcile()
            yield from self._take()
        keys = self.model.keys
        streams = (keys.requests, keys.groups, keys.samples)
        yield from self._call("finish", (keys.clock, keys.outstanding, *streams), ())
        self.book.finished = True
