"""From a run's folder to a Hugging Face folder: the policy at its newest checkpoint, at another one
that is kept, or at its end. Nothing in the run's folder is changed, and no trainer is needed.
"""

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from services.common.errors import UserError
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
    run: Path, folder: Path, *, model: Path, dtype: str, step: int | None = None
) -> Exported:
    """Write a folder that AutoModelForCausalLM and vLLM load: configuration, tokenizer, and weights
    in the run's dtype, with the names that the model's family has.

    run: the run's folder. model: the folder that the run began with. step: of a checkpoint; by
    default the end of a run that is complete, or the newest checkpoint. Raises UserError when the
    folder has something in it, or there is nothing to export.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: it is there and not empty; give a new folder")
    final = run / "model"
    end = _end(run)
    if end is not None and step in (None, end) and (final / "model.safetensors").is_file():
        made, found, source = (
            load_model(final, getattr(torch, dtype)),
            end,
            f"the model at the end ({final})",
        )
    else:
        made, found, source = _of_checkpoint(run, model, dtype, step=step)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Written beside, so that a folder with a name is always whole.
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        made.save_pretrained(fresh)
        for name in MODEL_FILES:
            if name not in WRITTEN_BY_TRANSFORMERS and (model / name).is_file():
                shutil.copyfile(model / name, fresh / name)
        fresh.chmod(0o755)  # mkdtemp's is the owner's alone
        fresh.rename(folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return Exported(folder, found, source)


def _end(run: Path) -> int | None:
    """Steps of a run that is complete: its report is there."""
    try:
        return int(json.loads((run / "trainer.json").read_text())["steps"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{run / 'trainer.json'} cannot be read: {error}") from error


def _of_checkpoint(run: Path, model: Path, dtype: str, *, step: int | None) -> tuple[Any, int, str]:
    """The model with a checkpoint's weights, its step, and what it is."""
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
        return (
            _with_weights(load_model(model, getattr(torch, dtype)), weights, model),
            found.step,
            str(found.folder),
        )
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
