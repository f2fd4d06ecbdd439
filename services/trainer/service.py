"""The trainer service: wiring of queue, policy service, torch thread, other ranks and run.

It ends as a whole: with a rank that is gone there is no going on, and the torch thread may wait for
it for ever, so that the process then ends by `os._exit`, after its last words.
"""

import asyncio
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import structlog
from headrace.v1 import policy_pb2_grpc

from services.common import grpc_kit, queue
from services.common.background import unless
from services.common.command import Invocation
from services.common.errors import Fenced
from services.common.lifecycle import Lifecycle, announce
from services.common.recorder import Recorder
from services.trainer.policy import PolicyServicer
from services.trainer.rank_processes import RankEnded, RankProcesses
from services.trainer.run_queue import RunQueue
from services.trainer.training import Training

LAST_WORDS_S = 30.0
"""At the end of a run: how long an aggregator that is away is waited for. Nobody else says what
became of the last groups."""

GRPC_GRACE_S = 1.0
"""For calls that run when the trainer ends: generators only watch then."""


async def main(invocation: Invocation, lifecycle: Lifecycle) -> None:
    """Run the trainer to the end of its run, or until SIGTERM.

    With `trainer.exit_when_done` it returns at the end of the run, and raises Fenced when a newer
    trainer has taken over; else it stays up and says `complete`, or that it was replaced.
    """
    recipe = invocation.recipe
    recorder = Recorder(
        run=recipe.run,
        producer=lifecycle.producer,
        service="trainer",
        settings=recipe.recorder,
        channel=grpc_kit.sync_channel(recipe.network.aggregator, recipe.network),
    )
    servicer = PolicyServicer(recorder)
    register = [
        (policy_pb2_grpc.add_PolicyServiceServicer_to_server, servicer, "headrace.v1.PolicyService")
    ]
    served = await grpc_kit.serve(recipe.network, lifecycle, register)
    announce(
        invocation.announce,
        grpc_port=served.port,
        health_port=served.health_port,
        pid=os.getpid(),
    )
    at_exit = ExitStack()
    torch_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch")
    ranks = await RankProcesses.start(recipe)
    report = None
    lost: RankEnded | None = None
    try:
        connecting = queue.connect(
            recipe.queue.url,
            run=recipe.run,
            claim_after_s=recipe.queue.claim_after_s,
            waiting=lifecycle.enter,
            details=lifecycle.details,
        )
        client = await unless(lifecycle.stopping, connecting)
        if client is None:
            return
        client.recorder = recorder
        training = Training(
            *(recipe, lifecycle, recorder, servicer, RunQueue(client), torch_thread, at_exit),
            ranks.place,
        )
        try:
            report = await ranks.beside(training.run())
        except Fenced as error:
            if recipe.trainer.exit_when_done:
                raise
            # A deployment would start it again: two trainers would replace each other for ever.
            structlog.get_logger().error("replaced", why=str(error))
            await lifecycle.set_ready(False)
            lifecycle.enter("replaced by a newer trainer")
            report = None
            await lifecycle.stopping.wait()
        await client.close()
        if report is not None and not recipe.trainer.exit_when_done:
            await ranks.beside(lifecycle.stopping.wait())
    except RankEnded as error:
        lost = error
        structlog.get_logger().error("RANK LOST", why=str(error))
    finally:
        try:
            await lifecycle.set_ready(False)
            if lost is None:
                torch_thread.shutdown(wait=True, cancel_futures=True)
            await ranks.end()
            if report is not None and recipe.trainer.exit_when_done:
                await asyncio.to_thread(recorder.close, LAST_WORDS_S)
            else:
                await asyncio.to_thread(recorder.close)
            await served.stop(GRPC_GRACE_S)
            at_exit.close()
        finally:
            if lost is not None:
                sys.stderr.flush()
                os._exit(lost.status)
