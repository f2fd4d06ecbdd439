"""Conversations with an engine of one's own, on a model folder: no trainer, no queue, no run."""

import os
from pathlib import Path

from headrace.v1 import generator_pb2, rollout_pb2

from services.common.config import Recipe
from services.common.errors import UserError
from services.common.recorder import Recorder
from services.generator import engine_environment, wire
from services.generator.equipment import equipped
from services.generator.group import GroupRunner
from services.generator.servicer import response
from services.generator.slots import Slots
from services.generator.template import ChatTemplate

FIRST_ANSWER_S = 600.0
"""The first request of an engine compiles."""


async def generate(
    request: generator_pb2.GenerateRequest, *, recipe: Recipe, folder: Path
) -> generator_pb2.GenerateResponse:
    """What a generator that serves the weights of `folder` would answer to the request.

    Starts an engine and ends it. Raises UserError for tools and environments that cannot be used,
    and when no conversation finished.
    """
    template = ChatTemplate(folder)
    async with equipped(recipe, template) as equipment:
        engine_environment.prepare(
            enforce_eager=recipe.generator.enforce_eager,
            vocab_size=engine_environment.vocab_size(folder),
        )
        # Here, since it imports vLLM, which takes seconds and reads the environment.
        from services.generator.engine import Engine

        equipment.check_formats()
        engine = await Engine.start(
            folder, settings=recipe.generator, dtype=recipe.model.dtype, with_weights=True
        )
        try:
            await engine.check(FIRST_ANSWER_S)
            runner = GroupRunner(
                equipment.setting(engine), Slots(recipe.generator.max_inflight), _recorder(recipe)
            )
            asked = rollout_pb2.RolloutRequest(
                group_id=f"call.{os.getpid()}",
                messages=request.messages,
                sampling=request.sampling,
                row_json=request.row_json,
            )
            try:
                group = await runner.run(asked, training=False)
            except wire.Malformed as error:
                raise UserError(str(error)) from None
        finally:
            engine.shutdown()
    return response(group, template, group_id=asked.group_id)


def _recorder(recipe: Recipe) -> Recorder:
    """One that sends nothing."""
    return Recorder(
        run=recipe.run,
        producer="once",
        service="generator",
        settings=recipe.recorder,
        channel=None,
    )
