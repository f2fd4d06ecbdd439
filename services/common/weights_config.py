"""The recipe's section on how published weights reach the generators.

Torch-free and import-cheap, as all of the recipe.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from services.common.section import Section
from services.common.training_config import Trainer


class Weights(Section):
    """How published weights reach the generators; more in docs/weights.md."""

    transport: Literal["grpc", "nccl"] = "grpc"
    """grpc: each generator fetches versions, in any topology. nccl: the trainer also broadcasts
    them to a group of generators, from GPU to GPU, for a fixed fleet; others fetch."""
    nccl_replicas: Annotated[int, Field(ge=1)] | None = None
    """With nccl: generators of the group; `generator.replicas` by default."""
    nccl_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """With nccl: longest time that the group may take to form, its members to pause for a version,
    and one chunk to pass. Past it the group is over, and the version is fetched."""


def mistakes(weights: Weights, trainer: Trainer) -> Iterator[str]:
    """What is wrong between keys of these sections, one line each."""
    if weights.transport != "nccl":
        if weights.nccl_replicas is not None:
            yield (
                f"weights.nccl_replicas: {weights.nccl_replicas} has no meaning with "
                'weights.transport = "grpc"; leave it out, or set transport = "nccl"'
            )
        return
    if trainer.lora is not None:
        yield (
            'weights.transport: "nccl" is for whole weights, and trainer.lora publishes adapters, '
            'which are small; set transport = "grpc"'
        )
    if trainer.device == "cpu":
        yield (
            'weights.transport: "nccl" sends from a GPU, and trainer.device is "cpu"; set '
            'transport = "grpc", or give the trainer a GPU'
        )
