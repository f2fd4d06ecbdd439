"""When embeddings are packed. That what is packed is what was loaded test_engine.py shows."""

from typing import Any

import torch
from torch.nn import functional

from services.generator.weight_backend import pack_when_used


def test_a_lookup_is_packed_at_its_first_use_as_a_head_and_anew_after_a_load() -> None:
    torch.manual_seed(0)
    layer: Any = torch.nn.Embedding(96, 64).requires_grad_(False)
    hidden = torch.randn(5, 64)
    pack_when_used(layer)
    waiting = layer.cpu_linear
    for _ in range(2):
        layer.weight.normal_()  # a load, before which nothing has been packed
        pack_when_used(layer)
        logits = layer.cpu_linear(hidden, layer.weight, None)
        expected = functional.linear(hidden, layer.weight)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        assert layer.cpu_linear is not waiting
        packed = layer.cpu_linear
        torch.testing.assert_close(packed(hidden, layer.weight, None), logits)
        assert layer.cpu_linear is packed, "packed once"
