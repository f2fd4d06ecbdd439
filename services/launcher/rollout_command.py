"""`headrace rollout`: a few conversations of one prompt now, to look at a template or a tool."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import grpc
from headrace.v1 import generator_pb2, generator_pb2_grpc, rollout_pb2
from rich.console import Console

from services.common import config, grpc_kit
from services.common.config import Recipe
from services.common.errors import UserError
from services.common.lifecycle import configure_logging
from services.launcher import checks, rollout_view, tiny_model
from services.launcher.errors import RunFailed
from services.launcher.plan import environment, this_machine

GRACE_S = 30.0
"""A running generator's answer may take so much longer than a conversation."""


def show(
    recipe_path: Path,
    *,
    overrides: list[str],
    prompt: str | None,
    row: int | None,
    columns: str | None,
    num: int,
    temperature: float | None,
    address: str | None,
    console: Console,
) -> int:
    """Run `num` conversations and print them; the exit status: 1 where none finished.

    Raises UserError for what cannot be asked for, RunFailed where a running generator does not
    answer.
    """
    recipe = config.load(recipe_path, overrides=overrides)
    request = _request(
        recipe, prompt=prompt, row=row, columns=columns, num=num, temperature=temperature
    )
    if address is not None:
        answer = _ask(address, request, recipe)
    else:
        checks.check_recipe(recipe)
        answer = _engine_of_its_own(recipe, request)
    rollout_view.print_answer(answer, console=console)
    return 0 if answer.rollouts else 1


def _request(
    recipe: Recipe,
    *,
    prompt: str | None,
    row: int | None,
    columns: str | None,
    num: int,
    temperature: float | None,
) -> generator_pb2.GenerateRequest:
    """The question, from a text or from a row of the recipe's dataset."""
    if (prompt is None) == (row is None):
        raise UserError("give either --prompt TEXT or --row N, a row of the recipe's dataset")
    given = _columns(columns)
    if prompt is not None:
        messages = [{"role": "user", "content": prompt}]
        if recipe.data.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": recipe.data.system_prompt})
    else:
        from services.trainer import dataset

        rows = dataset.load(recipe).training
        assert row is not None
        if not 0 <= row < len(rows):
            raise UserError(f"--row {row}: the dataset has the rows 0 to {len(rows) - 1}")
        chosen = rows[row]
        messages, given = chosen.messages, {**chosen.columns, **given}
    return generator_pb2.GenerateRequest(
        messages=[
            rollout_pb2.ChatMessage(role=message["role"], content=message["content"])
            for message in messages
        ],
        sampling=rollout_pb2.Sampling(
            temperature=recipe.generation.temperature if temperature is None else temperature,
            num_generations=num,
            max_completion_tokens=recipe.generation.max_completion_tokens,
        ),
        row_json=json.dumps(given) if given else "",
    )


def _columns(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        columns = json.loads(text)
    except ValueError as error:
        raise UserError(f"--columns: not JSON: {error}") from None
    if not isinstance(columns, dict):
        raise UserError("--columns: write a JSON object of dataset columns")
    return columns


def _ask(
    address: str, request: generator_pb2.GenerateRequest, recipe: Recipe
) -> generator_pb2.GenerateResponse:
    """A running generator's answer."""
    with grpc_kit.sync_channel(address, recipe.network) as channel:
        stub = generator_pb2_grpc.GeneratorServiceStub(channel)
        try:
            answer: generator_pb2.GenerateResponse = stub.Generate(
                request, timeout=recipe.generation.timeout_s + GRACE_S
            )
        except grpc.RpcError as error:
            told = f"the generator at {address}: {error.details()}"
            if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
                raise UserError(told) from None
            raise RunFailed(told) from None
    return answer


def _engine_of_its_own(
    recipe: Recipe, request: generator_pb2.GenerateRequest
) -> generator_pb2.GenerateResponse:
    """The answer of an engine that is started for it, on the recipe's model.

    What is said meanwhile goes to stderr, so that the answer can be piped.
    """
    progress = Console(stderr=True)
    configure_logging()
    with progress.status("looking for the model") as status:
        folder = tiny_model.resolve(
            recipe.model.path, progress=lambda done, text: status.update(f"{done:4.0%}  {text}")
        )
        status.update("starting an engine on the recipe's model")
        # Before vLLM is imported: it reads its settings there.
        quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "TQDM_DISABLE": "1"}
        os.environ |= environment(
            recipe,
            "generator",
            replica=0,
            machine=this_machine(),
            environ=quiet | dict(os.environ),
        )
        from services.generator import once

        return asyncio.run(once.generate(request, recipe=recipe, folder=folder))
