"""The list is what the installed vLLM says of itself."""

import importlib
import random

import pytest

from services.trainer.adapter_architectures import SERVED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

USUAL = {"Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM"}
OTHERS = {"GPT2LMHeadModel", "FalconForCausalLM", "MambaForCausalLM"}
SAMPLED = 12


def test_vllm_serves_adapters_of_what_is_listed_and_not_of_others() -> None:
    """Of the usual ones, and of some more: a different sample at each release of the list."""
    from vllm.model_executor.models import registry
    from vllm.model_executor.models.interfaces import supports_lora

    known = registry._TEXT_GENERATION_MODELS
    assert known.keys() >= SERVED
    assert USUAL <= SERVED
    sample = set(random.Random(len(SERVED)).sample(sorted(known), SAMPLED))
    checked = 0
    for name in sorted(sample | USUAL | OTHERS):
        module, attribute = known[name]
        place = module if "." in module else f"vllm.model_executor.models.{module}"
        try:
            found = getattr(importlib.import_module(place), attribute)
        except ImportError as error:  # of processors of images, which are not installed
            assert "torchvision" in str(error), name  # noqa: PT017
            continue
        checked += 1
        assert (name in SERVED) == supports_lora(found), name
    assert checked > SAMPLED
