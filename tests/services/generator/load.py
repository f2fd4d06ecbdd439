"""A thousand conversations, some of whose tools and environments fail or never return."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.v1 import rollout_pb2

from services.common.recorder import Recorder
from services.generator.conversation import Setting
from services.generator.group import GroupRunner
from services.generator.slots import Slots
from services.generator.types import Generated
from services.launcher.tiny_tokenizer import END
from tests.services.generator.fakes import recorder
from tests.services.generator.spoken import Speaker, call, setting_of

TOOLS = "tests.services.generator.load_tools"
SLOTS = 64
TURN_S = 0.2
"""What a turn of the engine takes."""

TIMEOUT_S = 1.0
"""Of a call of a tool."""

GENERATIONS = 5

ORDINARY = ("work", "ask", "room", "hall")
KINDS = {"fail": 20, "spin": 5, "wait": 5, "locked": 3, "uncounted": 3, "shut": 4}
"""Groups of 200: a tenth has a tool that fails, a twentieth one that never returns, a twentieth an
environment that fails."""


@dataclass(frozen=True)
class Kind:
    """What the conversations of a group do."""

    tool: str
    environment: str | None = None
    broken: int = 0


WHAT = {
    **{name: Kind(name) for name in ("work", "ask", "fail", "spin", "wait")},
    "room": Kind("move", "Room"),
    "hall": Kind("move", "Hall"),
    "locked": Kind("move", "Room", 1),
    "uncounted": Kind("move", "Room", 2),
    "shut": Kind("move", "Hall", 1),
}


def kinds(num_groups: int, *, endless: bool) -> list[str]:
    """A kind for each group, in an order that is always the same; without `endless` those that
    never return are ordinary ones."""
    chosen = [kind for kind, number in KINDS.items() for _ in range(number * num_groups // 200)]
    if not endless:
        chosen = ["work" if kind in ("spin", "wait") else kind for kind in chosen]
    rest = num_groups - len(chosen)
    chosen += [ORDINARY[number % len(ORDINARY)] for number in range(rest)]
    random.Random(0).shuffle(chosen)
    return chosen


@dataclass(frozen=True)
class Outcome:
    """What came of a load, and what it has left behind."""

    wall_s: float
    finished: int
    failed: Counter[str]
    calls: Counter[str]
    """Calls that failed, by tool."""
    busy_slots: int
    unfinished: int
    tasks: int
    """Tasks beyond those before the load."""
    strays: int
    live_instances: int
    processes: int
    idle_processes: int
    recorder: Recorder


async def run(folder: Path, *, chosen: Sequence[str]) -> Outcome:
    """Run a group of five conversations for each kind, all asked for at once."""

    def say(prompt: str) -> str:
        if "<tool>" in prompt:
            return f"done{END}"
        kind = prompt.split("<user>")[1].split("<end>")[0]
        return f"{call(WHAT[kind].tool, number=1)}{END}"

    engine = Speaker(say)
    scripted = engine.answer

    async def answer(number: int) -> Generated:
        await asyncio.sleep(TURN_S)
        return await scripted(number)

    engine.answer = answer
    async with setting_of(
        engine,
        folder,
        tools={
            "functions": [f"{TOOLS}:{name}" for name in ("work", "ask", "fail", "spin", "wait")],
            "timeout_s": TIMEOUT_S,
        },
        environments={
            "column": "environment",
            "classes": [{"environment": f"{TOOLS}:{name}"} for name in ("Room", "Hall")],
        },
        generator={"max_inflight": SLOTS},
    ) as setting:
        return await _load(setting, chosen)


async def _load(setting: Setting, chosen: Sequence[str]) -> Outcome:
    slots, measured = Slots(SLOTS), recorder()
    runner = GroupRunner(setting, slots, measured)
    tasks_before = len(asyncio.all_tasks())
    begin_s = time.monotonic()
    groups = await asyncio.gather(
        *(runner.run(_request(number, kind)) for number, kind in enumerate(chosen))
    )
    wall_s = time.monotonic() - begin_s
    for group in groups:
        runner.measure(group)
    # What was cut off ends a moment later.
    await asyncio.sleep(0.5)
    assert setting.tools is not None
    assert setting.environments is not None
    done = [c for group in groups for c in group.conversations.values()]
    return Outcome(
        wall_s=wall_s,
        finished=len(done),
        failed=sum((Counter(group.failed) for group in groups), Counter[str]()),
        calls=Counter(
            str(result.call.name)
            for conversation in done
            for turn in conversation.turns
            for result in turn.calls
            if result.failed
        ),
        busy_slots=slots.busy,
        unfinished=runner.unfinished,
        tasks=len(asyncio.all_tasks()) - tasks_before,
        strays=setting.tools.num_strays,
        live_instances=setting.environments.live - setting.environments.idle,
        processes=setting.tools.pool.alive,
        idle_processes=setting.tools.pool.idle,
        recorder=measured,
    )


def _request(number: int, kind: str) -> rollout_pb2.RolloutRequest:
    what = WHAT[kind]
    row = {"environment": what.environment, "broken": what.broken}
    return rollout_pb2.RolloutRequest(
        group_id=f"0.{number}.1.1",
        messages=[rollout_pb2.ChatMessage(role="user", content=kind)],
        row_json=json.dumps(row),
        sampling=rollout_pb2.Sampling(
            num_generations=GENERATIONS, temperature=1.0, max_completion_tokens=256
        ),
    )
