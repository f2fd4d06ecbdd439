"""From a run's folder to a Hugging Face folder: the policy at its newest checkpoint, at another one
that is kept, or at its end. Nothing in the run's folder is changed, and no trainer is needed.

A run that trains an adapter gives the model with the adapter merged in, or the adapter alone.
"""

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from services.common import adapter_files
from services.common.errors import UserError
from services.common.training_config import Lora
from services.trainer import lora as adapters
from services.trainer.checkpoint import Checkpoints
from services.trainer.model_folder import load_model
from services.trainer.policy import MODEL_FILES
from services.trainer.tensor_files import read_weights

TRIES = 3
"""A trainer at work removes its oldest checkpoints, perhaps the one that is being read."""

WRITTEN_BY_TRANSFORMERS = {"config.json", "generation_config.json"}
"""Of a model's files; the others are copied."""


@dataclass(frozen=True)
class Exported:
    """What was written."""

    folder: Path
    step: int
    """Optimizer steps that the weights have behind them."""
    source: str
    """Where they come from, for people."""


def export(
    run: Path,
    folder: Path,
    *,
    model: Path,
    dtype: str,
    step: int | None = None,
    lora: Lora | None = None,
    adapter_only: bool = False,
) -> Exported:
    """Write a folder that AutoModelForCausalLM and vLLM load: configuration, tokenizer, and weights
    in the run's dtype, with the names that the model's family has.

    run: the run's folder. model: the folder that the run began with. step: of a checkpoint; by
    default the end of a run that is complete, or the newest checkpoint. lora: of a run that trains
    an adapter; with `adapter_only` the folder has it alone, as peft writes it. Raises UserError
    when the folder has something in it, or there is nothing to export.
    """
    if adapter_only and lora is None:
        raise UserError(f"{run}: it trains all weights, and has no adapter; leave out --adapter")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: it is there and not empty; give a new folder")
    if adapter_only:
        assert lora is not None
        return _export_adapter(run, folder, lora, model=model, dtype=dtype, step=step)
    final = run / "model"
    end = _end(run)
    if end is not None and step in (None, end) and (final / "model.safetensors").is_file():
        made, found, source = (
            load_model(final, getattr(torch, dtype)),
            end,
            f"the model at the end ({final})",
        )
    else:
        weights, found, source = _of_checkpoint(run, step=step)
        made = load_model(model, getattr(torch, dtype))
        if lora is None:
            made = _with_weights(made, weights, model)
        else:
            _check_adapter(weights, model)
            made = adapters.merge(made, _rounded(weights, dtype), lora)

    def fill(fresh: Path) -> None:
        made.save_pretrained(fresh)
        for name in MODEL_FILES:
            if name not in WRITTEN_BY_TRANSFORMERS and (model / name).is_file():
                shutil.copyfile(model / name, fresh / name)

    _write(folder, fill)
    return Exported(folder, found, source)


def _export_adapter(
    run: Path, folder: Path, lora: Lora, *, model: Path, dtype: str, step: int | None
) -> Exported:
    """The adapter of a checkpoint, as peft writes it; the end of a run has one."""
    weights, found, source = _of_checkpoint(run, step=step)
    _check_adapter(weights, model)
    tensors = {
        adapters.file_name(name): tensor for name, tensor in _rounded(weights, dtype).items()
    }
    adapted = adapters.layers_of(load_model(model, getattr(torch, dtype)), weights)

    def fill(fresh: Path) -> None:
        save_file(tensors, fresh / adapter_files.WEIGHTS, metadata={"format": "pt"})
        config = adapters.config_file(lora, adapted, base=str(model.absolute()))
        (fresh / adapter_files.CONFIG).write_bytes(config)

    _write(folder, fill)
    return Exported(folder, found, source)


def _check_adapter(weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Raises UserError for a checkpoint that has no adapter, or more than one."""
    odd = [name for name in weights if not adapters.is_adapter(name)]
    if odd or not weights:
        raise UserError(
            f"the checkpoint is not of an adapter of {folder}: it has "
            f"{odd[0] if odd else 'no weights'}"
        )


def _rounded(weights: dict[str, torch.Tensor], dtype: str) -> dict[str, torch.Tensor]:
    """As the forward had them, and as they were published."""
    return {name: tensor.to(getattr(torch, dtype)) for name, tensor in weights.items()}


def _write(folder: Path, fill: Callable[[Path], None]) -> None:
    """Make a folder with what `fill` writes into one. Raises UserError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Written beside, so that a folder with a name is always whole.
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        fill(fresh)
        fresh.chmod(0o755)  # mkdtemp's is the owner's alone
        fresh.rename(folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _end(run: Path) -> int | None:
    """Steps of a run that is complete: its report is there."""
    try:
        return int(json.loads((run / "trainer.json").read_text())["steps"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{run / 'trainer.json'} cannot be read: {error}") from error


def _of_checkpoint(run: Path, *, step: int | None) -> tuple[dict[str, torch.Tensor], int, str]:
    """A checkpoint's weights, its step, and what it is."""
    checkpoints = Checkpoints(run / "checkpoints", keep=1)
    for last in range(TRIES - 1, -1, -1):
        found = checkpoints.look(step=step)
        if found is None:
            there = ", ".join(map(str, checkpoints.steps())) or "none"
            wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
            raise UserError(f"{run}: there is no {wanted} that can be read (steps: {there})")
        try:
            weights = read_weights(found.folder)
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            if found.folder.is_dir() or not last:
                raise UserError(f"{found.folder} cannot be read: {error}") from error
            continue
        return weights, found.step, str(found.folder)
    raise AssertionError("the last try returns or raises")


@torch.no_grad()
def _with_weights(made: Any, weights: dict[str, torch.Tensor], folder: Path) -> Any:
    """Put weights into a model; what is tied is there once, and what is not trained stays."""
    trained = {
        name: parameter for name, parameter in made.named_parameters() if parameter.requires_grad
    }
    if odd := weights.keys() ^ trained.keys():
        raise UserError(
            f"{folder} is not the model that the run trains: {sorted(odd)[0]} is on one side only"
        )
    for name, parameter in trained.items():
        if parameter.shape != weights[name].shape:
            raise UserError(
                f"{folder} is not the model that the run trains: {name} has shape "
                f"{list(parameter.shape)} there and {list(weights[name].shape)} in the checkpoint"
            )
        parameter.copy_(weights[name])
    return made
