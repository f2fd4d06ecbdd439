import pytest
import torch

from services.common.errors import UserError
from services.common.training_config import Loss, Optimizer
from services.trainer.ranks import Group
from services.trainer.sharding import _layers, _the_dtype, unique_tensors
from services.trainer.step import OptimizerStep
from tests.services.trainer.architectures import ARCHITECTURES
from tests.services.trainer.numerics import make_model


def test_layers_are_the_decoders() -> None:
    model = make_model()
    assert _layers(model) == list(model.model.layers)


def test_a_model_that_names_no_layers_is_refused() -> None:
    model = make_model()
    model._no_split_modules = None
    with pytest.raises(UserError, match=r"^trainer\.ranks: Qwen3ForCausalLM does not say"):
        _layers(model)


def test_parameters_of_two_dtypes_are_refused() -> None:
    model = make_model()
    assert _the_dtype(model) == torch.float32
    model.model.norm.to(torch.bfloat16)
    with pytest.raises(UserError, match=r"^trainer\.ranks: .* \(bfloat16, float32\)"):
        _the_dtype(model)


@pytest.mark.parametrize("tied", [False, True])
def test_tied_tensors_are_there_once_under_the_first_name(tied: bool) -> None:
    model = make_model(tie_word_embeddings=tied)
    names = [name for name, _ in unique_tensors(model)]
    assert ("lm_head.weight" in names) == (not tied)
    assert len(names) == len(set(names)) == len(list(model.parameters()))


def test_a_model_that_takes_one_sample_at_a_time_is_refused() -> None:
    alone = next(each for each in ARCHITECTURES if not each.shares)
    with pytest.raises(UserError, match=r"^trainer\.ranks: .* one sample at a time"):
        OptimizerStep(
            alone.make(),
            optimizer=Optimizer(),
            loss=Loss(),
            temperature=1.0,
            group=Group(0, 2),
        )
