"""The aggregator's wiring: MetricsService over gRPC and REST over HTTP in one event loop, one
writer thread.

waits_for: nothing; producers come and go. unblocked_by: a batch or a query, each on its own.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
import structlog
from headrace.v1 import metrics_pb2 as wire
from headrace.v1 import metrics_pb2_grpc
from sqlalchemy.exc import SQLAlchemyError

from services.aggregator import alerts, http_server, maintenance, recipes, retention
from services.aggregator.alert_rules import Rule, compile_rules
from services.aggregator.api.app import create_app
from services.aggregator.api.backend import Backend
from services.aggregator.batch import BadBatch
from services.aggregator.catalogue import with_custom
from services.aggregator.group_commit import GroupCommit
from services.aggregator.http_server import DRAIN_S
from services.aggregator.ingest import Ingest
from services.aggregator.intake import Intake
from services.aggregator.leading import Leading
from services.aggregator.mirrors import feeding as mirroring
from services.aggregator.mirrors.types import Mirror
from services.aggregator.store import Store
from services.aggregator.webhook import Webhook, webhook_of
from services.common import grpc_kit, lifecycle, secret_keys
from services.common.background import unless
from services.common.certificates import certificates_of
from services.common.command import Invocation
from services.common.config import Recipe
from services.common.tokens import tokens_of

PROBE_EVERY_S = 5.0
"""How often readiness is checked by writing a row."""

WRITES_WITHIN_S = 10.0
"""Of that row, all that the writer has to do before it included; beyond it the store hangs."""


class Metrics(metrics_pb2_grpc.MetricsServiceServicer):  # type: ignore[misc]
    """The wire's edge: hands batches on, answers after the commit."""

    def __init__(self, batches: GroupCommit, intake: Intake) -> None:
        self._batches = batches
        self._intake = intake

    async def PushDeltas(
        self, request: wire.PushDeltasRequest, context: Any
    ) -> wire.PushDeltasResponse:
        """Take one batch; INVALID_ARGUMENT: it has no name; UNAVAILABLE: the store failed."""
        begun_s, now_s = time.monotonic(), time.time()
        try:
            receipt = await self._batches.take(request, arrived_s=now_s)
        except BadBatch as error:
            self._intake.missed("refused")
            await grpc_kit.abort(context, grpc.StatusCode.INVALID_ARGUMENT, "BAD_BATCH", str(error))
        except SQLAlchemyError as error:
            self._intake.missed("failed")
            cause = getattr(error, "orig", None) or error
            structlog.get_logger().error(
                "a batch was not committed", producer=request.producer, cause=str(cause)
            )
            await grpc_kit.abort(
                context,
                grpc.StatusCode.UNAVAILABLE,
                "STORE_FAILED",
                f"the store failed and nothing of the batch was kept: {cause}; send it again",
            )
        self._intake.took(
            duplicate=receipt.duplicate,
            accepted=receipt.accepted,
            rejected=sum(each.number for each in receipt.rejected),
            commit_s=time.monotonic() - begun_s,
            now_s=now_s,
        )
        return wire.PushDeltasResponse(
            accepted=receipt.accepted,
            duplicate=receipt.duplicate,
            rejected=[
                wire.Rejection(key=each.key, reason=f"{each.reason}: {each.detail}")
                for each in receipt.rejected
            ],
        )


def database_of(recipe: Recipe) -> str:
    """The store's URL: the recipe's, or SQLite under the run's folder, which is made."""
    if recipe.aggregator.database is not None:
        return recipe.aggregator.database
    recipe.run_folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{recipe.run_folder / 'metrics.sqlite'}"


async def main(invocation: Invocation, state: lifecycle.Lifecycle) -> None:
    """Serve until asked to stop. Raises UserError for a taken port, and for a token,
    certificate or database that cannot be used."""
    recipe = invocation.recipe
    network = recipe.network
    async with contextlib.AsyncExitStack() as stack:
        tokens, certificates = tokens_of(network), certificates_of(network)
        database_password = secret_keys.database_password(recipe.aggregator)
        catalogue = with_custom(recipe.metrics)
        rules = compile_rules(recipe.alerts, catalogue)
        webhook, mirrors = webhook_of(recipe.alerts), mirroring.mirrors_of(recipe)
        http_port = recipe.aggregator.http_port
        listening = stack.enter_context(http_server.listen(network.host, http_port))
        http_port = listening.getsockname()[1]
        state.enter("opening the database")
        store = Store.open(database_of(recipe), password=database_password)
        stack.callback(store.close)
        writer = ThreadPoolExecutor(1, thread_name_prefix="writer")
        stack.callback(writer.shutdown)
        keep_s = retention.days_to_s(recipe.aggregator.keep_runs_days)
        backend = Backend(
            store,
            catalogue,
            writer,
            keep_s,
            stuck_after_s=recipe.ledger.stuck_after_s,
            run=recipe.run,
            draining=state.stopping,
        )
        await backend.write(partial(recipes.remember, store, recipe, now_s=time.time()))
        sweeping = asyncio.create_task(
            retention.keep_sweeping(
                store,
                write=backend.write,
                default_s=keep_s,
                every_s=retention.SWEEP_EVERY_S,
            ),
            name="sweeping",
        )
        ingest = Ingest(store, catalogue=catalogue, producer=state.producer, traces=recipe.traces)
        batches = GroupCommit(ingest, write=backend.write)
        working = asyncio.create_task(
            maintenance.keep_working(
                store,
                write=backend.write,
                batches_wait=lambda: batches.is_wanted,
                keep_groups=recipe.ledger.keep_groups,
            ),
            name="maintenance",
        )
        copying = asyncio.create_task(
            maintenance.keep_checkpointing(store, write=backend.write), name="checkpoints"
        )
        watching, feeding = _watching(recipe, backend, rules, webhook, mirrors, stack)
        tasks = (sweeping, working, copying, watching, feeding)
        stack.push_async_callback(lifecycle.cancel, *tasks)
        servicer = Metrics(batches, backend.intake)
        served = await grpc_kit.serve(
            network,
            state,
            [
                (
                    metrics_pb2_grpc.add_MetricsServiceServicer_to_server,
                    servicer,
                    "headrace.v1.MetricsService",
                )
            ],
        )
        stack.push_async_callback(served.stop, DRAIN_S)
        app = create_app(
            backend,
            tokens=tokens,
            needs_certificate=certificates is not None,
            max_requests_per_s=network.max_requests_per_s,
        )
        context = (
            None
            if certificates is None
            else http_server.server_context(certificates, ask_clients=tokens is None)
        )
        http = await stack.enter_async_context(
            http_server.serving(
                app, listening, max_connections=network.max_connections, context=context
            )
        )
        state.details["http_port"] = str(http_port)
        lifecycle.announce(
            invocation.announce,
            grpc_port=served.port,
            health_port=served.health_port,
            http_port=http_port,
            pid=os.getpid(),
        )
        state.enter("taking metrics")
        await state.set_ready(True)
        while not await state.stopped_within(PROBE_EVERY_S):
            if http.done():
                http.result()
                raise RuntimeError("the HTTP server ended by itself")
            for task in tasks:
                if task.done():
                    task.result()
            await state.set_ready(bool(await unless(state.stopping, _writable(backend))))
        await state.set_ready(False)


def _watching(
    recipe: Recipe,
    backend: Backend,
    rules: tuple[Rule, ...],
    webhook: Webhook | None,
    mirrors: list[Mirror],
    stack: contextlib.AsyncExitStack,
) -> tuple[asyncio.Task[None], asyncio.Task[None]]:
    """The tasks that look at the recipe's run: of alerts, and of mirrors; each with a claim of its
    own, so that none waits for another."""
    store, run = backend.store, recipe.run

    def claim(what: str) -> Callable[[], bool]:
        leading = Leading(store.engine, run, what=what)
        stack.callback(leading.close)
        return leading.holds

    watch = alerts.Watch(
        store, run, rules, webhook=webhook, stuck_after_s=recipe.ledger.stuck_after_s
    )
    watching = alerts.keep_watching(
        watch,
        write=backend.write,
        leads=claim("alerts"),
        every_s=recipe.alerts.every_s,
        start_s=alerts.START_S,
    )
    feedings = [
        mirroring.Feeding(
            store,
            run,
            mirror,
            catalogue=backend.catalogue,
            settle_s=recipe.mirrors.settle_s,
            leads=claim(f"mirrors/{mirror.name}"),
        )
        for mirror in mirrors
    ]
    feeding = mirroring.keep_feeding(feedings, write=backend.write, every_s=mirroring.EVERY_S)
    return (
        asyncio.create_task(watching, name="alerts"),
        asyncio.create_task(feeding, name="mirrors"),
    )


async def _writable(backend: Backend) -> bool:
    try:
        await asyncio.wait_for(backend.write(backend.store.probe), WRITES_WITHIN_S)
    except TimeoutError:
        structlog.get_logger().error("the store does not write", waited_s=WRITES_WITHIN_S)
        return False
    except SQLAlchemyError as error:
        cause = getattr(error, "orig", None) or error
        structlog.get_logger().error("the store cannot be written", cause=str(cause))
        return False
    return True
