"""Watches the run of the aggregator's recipe: judges the rules, keeps what fires, tells a webhook.

waits_for: its interval. unblocked_by: time alone; no one waits for it. Reading is done beside the
writer, which only notes what has changed.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import structlog
from sqlalchemy.exc import SQLAlchemyError

from services.aggregator import alert_book, fleet
from services.aggregator.alert_book import Call
from services.aggregator.alert_rules import Judgement, KeyRule, Rule, change
from services.aggregator.alert_signals import judge, open_step, read_facts
from services.aggregator.series import find_run
from services.aggregator.store import Store
from services.aggregator.webhook import CallFailed, Webhook, body, pause_s

T = TypeVar("T")

START_S = 30.0
"""Before the first look: after an absence of the aggregator, services first send what they kept."""

OVER_S = 60.0
"""Without a look of the trainer's at the queue, and with no group under way, a run is over."""

RUN_OVER = "the run is over"
NO_RULE = "the recipe has no such rule any more"
RIGHT_AGAIN = "it is right again"


class Write(Protocol):
    """Runs blocking work in the writer's thread."""

    async def __call__(self, work: Callable[[], T]) -> T:
        """Run it, and return what it returns."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one look at a run has found."""

    run_id: int
    step: int
    """The step that was open."""
    over: bool
    judged: tuple[tuple[Rule, Judgement], ...]
    """Of all rules; none where the run is over."""


class Watch:
    """The alerts of one run. All calls block; `note` and `tried` are for the writer's thread."""

    def __init__(
        self,
        store: Store,
        run: str,
        rules: tuple[Rule, ...],
        *,
        webhook: Webhook | None,
        stuck_after_s: float,
    ) -> None:
        self._store = store
        self._run = run
        self._rules = rules
        self._webhook = webhook
        self._stuck_after_s = stuck_after_s

    def look(self, *, now_s: float) -> Seen | None:
        """Judge all rules, at one moment of the store; None where the run is not known yet."""
        with self._store.engine.begin() as connection:
            run = find_run(connection, self._run)
            if run is None:
                return None
            over = fleet.is_over(connection, run, since_s=now_s - OVER_S)
            judged: list[tuple[Rule, Judgement]] = []
            if not over:
                facts = read_facts(connection, run, now_s=now_s, stuck_after_s=self._stuck_after_s)
                for rule in self._rules:
                    if isinstance(rule.by, KeyRule):
                        judgement = judge(connection, run, rule.by, now_s=now_s)
                    else:
                        judgement = rule.by(facts)
                    judged.append((rule, judgement))
            step = open_step(run, connection)
        return Seen(run_id=run.id, step=step, over=over, judged=tuple(judged))

    def note(self, seen: Seen, *, now_s: float) -> list[Call]:
        """Keep what has changed, in one transaction; the calls of the webhook that are due."""
        tell = self._webhook is not None
        with self._store.write() as writing:
            connection = writing.connection
            run = find_run(connection, self._run)
            if run is None or run.id != seen.run_id:
                return []  # deleted meanwhile
            firing = alert_book.firing(connection, run.id)
            ended: dict[str, str] = {}
            for rule, judgement in seen.judged:
                verdict = change(judgement, firing=rule.name in firing)
                if verdict == "end":
                    ended[rule.name] = RIGHT_AGAIN
                elif verdict == "fire":
                    alert_book.fire(
                        connection,
                        run.id,
                        name=rule.name,
                        severity=rule.severity,
                        sentence=judgement.sentence,
                        value=judgement.value,
                        step=seen.step,
                        now_s=now_s,
                        tell=tell,
                    )
                    structlog.get_logger().warning(
                        "an alert fires",
                        run=self._run,
                        alert=rule.name,
                        severity=rule.severity,
                        sentence=judgement.sentence,
                    )
            known = {rule.name for rule in self._rules}
            for name in firing:
                if seen.over:
                    ended[name] = RUN_OVER
                elif name not in known:
                    ended[name] = NO_RULE
            for name, because in ended.items():
                alert_book.end(
                    connection, run.id, name=name, because=because, now_s=now_s, tell=tell
                )
                structlog.get_logger().info(
                    "an alert has ended", run=self._run, alert=name, because=because
                )
            return alert_book.due(connection, run.id, now_s=now_s) if tell else []

    def send(self, call: Call) -> CallFailed | None:
        """Tell the webhook; what went wrong, None when it was told."""
        assert self._webhook is not None
        try:
            self._webhook.send(body(self._run, call.alert, call.event))
        except CallFailed as error:
            return error
        return None

    def tried(self, call: Call, failure: CallFailed | None, *, now_s: float) -> None:
        """Note what became of a call."""
        again_s = None if failure is None or failure.final else pause_s(call.tries + 1)
        with self._store.write() as writing:
            if failure is None:
                alert_book.told(writing.connection, call, state="sent")
            elif again_s is None:
                alert_book.told(writing.connection, call, state="failed", error=str(failure))
            else:
                alert_book.told(
                    writing.connection,
                    call,
                    state="pending",
                    next_s=now_s + again_s,
                    error=str(failure),
                )
        if failure is not None:
            structlog.get_logger().error(
                "an alert could not be told",
                run=self._run,
                alert=call.alert.name,
                event_told=call.event,
                cause=str(failure),
                tries=call.tries + 1,
                again_in_s=again_s,
            )


async def watch_once(
    watch: Watch, *, write: Write, leads: Callable[[], bool], clock: Callable[[], float]
) -> None:
    """One look, and the calls that are due."""
    if not await asyncio.to_thread(leads):
        return
    seen = await asyncio.to_thread(partial(watch.look, now_s=clock()))
    if seen is None:
        return
    for call in await write(partial(watch.note, seen, now_s=clock())):
        failure = await asyncio.to_thread(watch.send, call)
        await write(partial(watch.tried, call, failure, now_s=clock()))


async def keep_watching(
    watch: Watch,
    *,
    write: Write,
    leads: Callable[[], bool],
    every_s: float,
    start_s: float,
    clock: Callable[[], float] = time.time,
) -> None:
    """Look again and again, until cancelled. A store that fails is tried again the next time."""
    await asyncio.sleep(start_s)
    while True:
        try:
            await watch_once(watch, write=write, leads=leads, clock=clock)
        except SQLAlchemyError as error:
            cause = getattr(error, "orig", None) or error
            structlog.get_logger().error("alerts wait for the store", cause=str(cause))
        await asyncio.sleep(every_s)
