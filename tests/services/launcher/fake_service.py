"""A service for tests of the launcher: the real command line, status, gRPC and metrics, but no
engine.

`fake_service.py SERVICE RECIPE --set … --replica N --announce FILE`. The trainer "trains"
trainer.max_steps steps, then writes trainer.json; what else it does is said by the environment
variable FAKE_TRAINER.
"""

import json
import os
import sys

import typer

from services.common import lifecycle
from services.common.command import Invocation, service_command
from services.common.errors import UserError
from services.common.grpc_kit import serve, sync_channel
from services.common.lifecycle import Lifecycle
from services.common.recorder import Recorder

REPORT = {
    "reward_first": None,
    "reward_last": None,
    "eval_before": 0.5,
    "eval_after": 0.75,
    "groups": {
        "dispatched": 12,
        "trained": 10,
        "rolled_back": 0,
        "dropped": {"run_ended": 2},
        "given_up": 0,
        "in_flight": 0,
        "trained_twice": 0,
    },
    "max_logprob_gap": 1e-6,
    "gap_tokens": 1000,
    "versions_published": 11,
    "staleness_max": 1,
    "trained_samples": 160,
    "trained_tokens": 480,
    "step_s_median": 0.01,
    "time_budget": {"rollout_wait": 0.004, "fwd_bwd": 0.006},
    "samples_per_s": 100.0,
}


async def worker(invocation: Invocation, state: Lifecycle) -> None:
    """Wait, ready, until told to stop."""
    served = await serve(invocation.recipe.network, state)
    lifecycle.announce(
        invocation.announce, grpc_port=served.port, health_port=served.health_port, pid=os.getpid()
    )
    state.enter("waiting for work")
    await state.set_ready(True)
    await state.stopping.wait()
    await served.stop(0)


async def trainer(invocation: Invocation, state: Lifecycle) -> None:
    """Train as told."""
    recipe = invocation.recipe
    behaviour = os.environ.get("FAKE_TRAINER", "train")
    if behaviour == "mistake":
        raise UserError("data.file: there is no file rows.jsonl")
    served = await serve(recipe.network, state)
    lifecycle.announce(
        invocation.announce, grpc_port=served.port, health_port=served.health_port, pid=os.getpid()
    )
    channel = sync_channel(recipe.network.aggregator, recipe.network)
    recorder = Recorder(
        run=recipe.run,
        producer=state.producer,
        service="trainer",
        settings=recipe.recorder,
        channel=channel,
    )
    try:
        await train(behaviour, invocation, state, recorder)
    finally:
        # A server that outlives its event loop can take the interpreter down with a SIGSEGV.
        recorder.close(30.0)
        channel.close()
        await served.stop(0)


async def train(
    behaviour: str, invocation: Invocation, state: Lifecycle, recorder: Recorder
) -> None:
    """The steps, and the account of them."""
    recipe = invocation.recipe
    steps = recipe.trainer.max_steps or 0
    state.enter("training")
    await state.set_ready(True)
    state.details |= {"attempt": "1", "max_steps": str(steps), "eval_before": "0.5"}
    failed = recipe.run_folder / "failed"
    if behaviour == "fail" or (behaviour == "fail once" and not failed.exists()):
        failed.touch()
        raise RuntimeError("the loss is not finite")
    for step in range(1, steps + 1):
        recorder.set_clock(attempt=1, step=step)
        recorder.observe("perf/step_s", 0.01)
        recorder.observe("loss", 0.5)
        await state.stopped_within(0.01)
        state.details |= {"step": str(step), "version": str(step)}
    if behaviour == "forever":
        await state.stopping.wait()
    elif not state.stopping.is_set():
        report = recipe.run_folder / "trainer.json"
        report.write_text(json.dumps({"steps": steps, **REPORT}))


async def scorer(invocation: Invocation, state: Lifecycle) -> None:
    """Score without being asked: reward n / 10 at step n."""
    recipe = invocation.recipe
    channel = sync_channel(recipe.network.aggregator, recipe.network)
    recorder = Recorder(
        run=recipe.run,
        producer=state.producer,
        service="scorer",
        settings=recipe.recorder,
        channel=channel,
    )
    steps = recipe.trainer.max_steps or 0
    for step in range(1, steps + 1):
        recorder.set_clock(attempt=1, step=step)
        recorder.observe("reward", step / 10)
    await worker(invocation, state)
    recorder.close(30.0)
    channel.close()


async def generator(invocation: Invocation, state: Lifecycle) -> None:
    """Generate 100 tokens, said when told to stop, as a last flush would."""
    recipe = invocation.recipe
    channel = sync_channel(recipe.network.aggregator, recipe.network)
    recorder = Recorder(
        run=recipe.run,
        producer=state.producer,
        service="generator",
        settings=recipe.recorder,
        channel=channel,
    )
    await worker(invocation, state)
    recorder.set_clock(attempt=1, step=1)
    recorder.count("rollout/generated_tok_s", 100)
    recorder.close(30.0)
    channel.close()


if __name__ == "__main__":
    service = sys.argv.pop(1)
    mains = {"trainer": trainer, "scorer": scorer, "generator": generator}
    typer.run(service_command(service, mains[service], "A fake."))
