"""The trainer service: wiring of queue, policy service, torch thread, other ranks and run. With
several nodes it is node 0, and the other ones (node.py) end with it and with its status.

It ends as a whole: with a rank that is gone there is no going on, and the torch thread may wait for
it for ever, so that the process then ends by `os._exit`, after its last words.
"""

import asyncio
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import structlog
from headrace.v1 import policy_pb2_grpc, ranks_pb2_grpc, transfer_pb2_grpc

from services.common import grpc_kit, queue, secret_keys
from services.common.background import unless
from services.common.command import Invocation
from services.common.config import Recipe
from services.common.errors import STOPPED_STATUS, EndedWith, Fenced
from services.common.lifecycle import Lifecycle, announce, status_of
from services.common.recorder import Recorder
from services.trainer import meeting as meetings
from services.trainer import node, transfer_calls
from services.trainer.meeting import Meeting
from services.trainer.policy import PolicyServicer
from services.trainer.rank_ended import RankEnded
from services.trainer.rank_processes import RankProcesses
from services.trainer.run_queue import RunQueue
from services.trainer.training import Training
from services.trainer.weight_group import WeightGroup

LAST_WORDS_S = 30.0
"""At the end of a run: how long an aggregator that is away is waited for. Nobody else says what
became of the last groups."""

GRPC_GRACE_S = 1.0
"""For calls that run when the trainer ends: generators only watch then."""


async def main(invocation: Invocation, lifecycle: Lifecycle) -> None:
    """Run the trainer to the end of its run, or until SIGTERM; on a node other than the first, host
    ranks.

    With `trainer.exit_when_done` it returns at the end of the run, and raises Fenced when a newer
    trainer has taken over; else it stays up and says `complete`, or that it was replaced.
    With several nodes, EndedWith says that it was asked to stop before.
    """
    if invocation.node:
        await node.main(invocation, lifecycle)
        return
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
    if recipe.weights.transport == "nccl":
        servicer.group = WeightGroup(
            recorder,
            replicas=recipe.weights.nccl_replicas or recipe.generator.replicas,
            timeout_s=recipe.weights.nccl_timeout_s,
            present=servicer.serving.__contains__,
        )
        calls = transfer_calls.TransferServicer(servicer.group)
        add = transfer_pb2_grpc.add_TransferServiceServicer_to_server
        register.append((add, calls, transfer_calls.SERVICE))
    meeting = None
    if recipe.trainer.nodes > 1:
        meeting = Meeting(recipe, lifecycle)
        add = ranks_pb2_grpc.add_RankServiceServicer_to_server
        register.append((add, meeting, meetings.SERVICE))
    served = await grpc_kit.serve(recipe.network, lifecycle, register)
    announce(
        invocation.announce,
        grpc_port=served.port,
        health_port=served.health_port,
        pid=os.getpid(),
    )
    at_exit = ExitStack()
    torch_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch")
    ranks: RankProcesses | None = None
    report = None
    lost: RankEnded | None = None
    status = 0 if meeting is None else STOPPED_STATUS
    try:
        place = None
        if meeting is not None:
            place = await unless(lifecycle.stopping, meeting.gather())
        if meeting is None or place is not None:
            ranks = await RankProcesses.start(recipe, place, meeting=meeting)
            parts = (recipe, lifecycle, recorder, servicer)
            report = await _run(*parts, ranks, torch_thread, at_exit)
        if report is not None:
            status = 0
    except RankEnded as error:
        lost, status = error, error.status
        structlog.get_logger().error("RANK LOST", why=str(error))
    except BaseException as error:
        status = status_of(error)
        raise
    finally:
        try:
            await lifecycle.set_ready(False)
            if lost is None:
                await asyncio.to_thread(torch_thread.shutdown, wait=True, cancel_futures=True)
            # Before the ranks here: those of other nodes would take it for a failure.
            if meeting is not None:
                await meeting.end(status)
            if ranks is not None:
                await ranks.end()
            if report is not None and recipe.trainer.exit_when_done:
                await asyncio.to_thread(recorder.close, LAST_WORDS_S)
            else:
                await asyncio.to_thread(recorder.close)
            await served.stop(GRPC_GRACE_S)
            if servicer.group is not None:
                await servicer.group.close()
            at_exit.close()
        finally:
            if lost is not None:
                sys.stderr.flush()
                os._exit(lost.status)
    if status:
        raise EndedWith(status, "asked to stop before the end of the run")


async def _run(
    recipe: Recipe,
    lifecycle: Lifecycle,
    recorder: Recorder,
    servicer: PolicyServicer,
    ranks: RankProcesses,
    torch_thread: ThreadPoolExecutor,
    at_exit: ExitStack,
) -> dict[str, Any] | None:
    """Train, and stay up as long as is wanted; the report of a run that came to its end. Raises
    RankEnded."""
    connecting = queue.connect(
        secret_keys.queue_url(recipe.queue),
        run=recipe.run,
        claim_after_s=recipe.queue.claim_after_s,
        waiting=lifecycle.enter,
        details=lifecycle.details,
    )
    client = await ranks.beside(unless(lifecycle.stopping, connecting))
    if client is None:
        return None
    client.recorder = recorder
    training = Training(
        *(recipe, lifecycle, recorder, servicer, RunQueue(client), torch_thread, at_exit),
        ranks.place,
    )
    report = None
    try:
        report = await ranks.beside(training.run())
    except Fenced as error:
        if recipe.trainer.exit_when_done:
            raise
        # A deployment would start it again: two trainers would replace each other for ever.
        structlog.get_logger().error("replaced", why=str(error))
        await lifecycle.set_ready(False)
        lifecycle.enter("replaced by a newer trainer")
        await lifecycle.stopping.wait()
    await client.close()
    if report is not None and not recipe.trainer.exit_when_done:
        await ranks.beside(lifecycle.stopping.wait())
    return report
