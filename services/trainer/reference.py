"""The frozen reference model of the KL penalty: what it says of a row's trained tokens.

It is a second model in memory, on every rank whole, in the dtype and at the temperature of the
policy, so that both are distributions over the same draws. Where the policy is an adapter of the
reference there is no second one: it is the policy's model with the adapter off.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig

from services.common.config import Recipe
from services.common.errors import UserError
from services.trainer import lora
from services.trainer.compatibility import prepare_model
from services.trainer.forward import PolicyForward, RowOutput
from services.trainer.model_folder import load_model
from services.trainer.packing import PackedRow

TOKENIZER_FILE = "tokenizer.json"


class Reference:
    """Log-probabilities of a prepared model that is never trained.

    Example: `Reference(load_reference(...), temperature=1.0)(row)` for a row with M terms is [M].
    """

    def __init__(self, model: Any, *, temperature: float) -> None:
        self._forward = PolicyForward(model.requires_grad_(False).eval(), temperature=temperature)

    @torch.no_grad()
    def __call__(self, row: PackedRow) -> torch.Tensor:
        """[M] float32, in nats: of every term of a row that is on the model's device. No gradient
        is recorded."""
        output: RowOutput = self._forward(row)
        return output.logprobs


class AdapterOff:
    """Log-probabilities of the model that a policy adapts, at the policy's temperature, by the
    policy's own forward: with several ranks, all of them make the same calls."""

    def __init__(self, forward: PolicyForward) -> None:
        self._forward = forward

    @torch.no_grad()
    def __call__(self, row: PackedRow) -> torch.Tensor:
        """[M] float32, in nats: of every term of a row that is on the model's device. No gradient
        is recorded, and none of the policy's is changed."""
        with lora.adapter_off(self._forward.model):
            output: RowOutput = self._forward(row)
        return output.logprobs


def reference_of(
    recipe: Recipe, device: torch.device, dtype: torch.dtype
) -> "Reference | type[AdapterOff] | None":
    """The reference that a recipe asks for: another model, or the policy's with its adapter off;
    None when `loss.kl_coefficient` is 0. Raises UserError as `load_reference` does."""
    if recipe.loss.kl_coefficient and recipe.trainer.lora and recipe.loss.reference is None:
        return AdapterOff
    model = load_reference(recipe, device, dtype)
    if model is None:
        return None
    return Reference(model, temperature=recipe.generation.temperature)


def load_reference(recipe: Recipe, device: torch.device, dtype: torch.dtype) -> Any | None:
    """The model of `loss.reference`, the initial weights by default, prepared for packed rows; None
    when `loss.kl_coefficient` is 0.

    Raises UserError for a folder that holds no model, for a model that cannot be run on packed rows
    and for one with another vocabulary: its probabilities would be of other tokens.
    """
    if not recipe.loss.kl_coefficient:
        return None
    policy = Path(recipe.model.path)
    folder = policy if recipe.loss.reference is None else Path(recipe.loss.reference).expanduser()
    if not (folder / "config.json").is_file():
        raise UserError(
            f"loss.reference: {folder} is no model folder (it has no config.json); give one, or "
            "leave the key out for the initial weights"
        )
    if folder != policy:
        _check_vocabulary(folder, policy)
    model = load_model(folder, dtype, of="loss.reference").to(device)
    try:
        prepare_model(model)
    except UserError as error:
        raise UserError(f"loss.reference: {folder} cannot be used: {error}") from error
    return model


def _check_vocabulary(folder: Path, policy: Path) -> None:
    sizes = [
        AutoConfig.from_pretrained(each, local_files_only=True).get_text_config().vocab_size
        for each in (folder, policy)
    ]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"loss.reference: {folder} has a vocabulary of {sizes[0]}, the policy in {policy} one "
            f"of {sizes[1]}; both must read the same tokens"
        )
    files = [each / TOKENIZER_FILE for each in (folder, policy)]
    if all(file.is_file() for file in files):
        ours, theirs = (Tokenizer.from_file(str(file)).get_vocab() for file in files)
        if ours != theirs:
            odd = sorted(dict(ours.items() ^ theirs.items()))[0]
            raise UserError(
                f"loss.reference: the tokenizer of {folder} is another one than the policy's in "
                f"{policy} (first difference: {odd!r}); both must read the same tokens"
            )
