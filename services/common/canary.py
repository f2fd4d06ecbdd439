"""Canary rows and the perturbation of the load-path proof: what trainer and generators must compute
alike.

Both sides derive them from fixed seeds with numpy's PCG64, whose streams are stable across machines
and versions.
"""

import hashlib
from typing import Any

import numpy as np

ROWS = 64
"""Canary rows."""

ROW_TOKENS = 16
"""Tokens of each."""

PERTURBATION = 0.05
"""Each tensor is multiplied by 1 + PERTURBATION * u, u uniform in [-1, 1)."""

LORA_B = ".lora_B.weight"
"""How the names of an adapter's second factors end, in the layout of peft."""


def rows(vocab_size: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """The canary's tokens, int64 [ROWS, ROW_TOKENS]: uniform over the vocabulary, the same on
    every machine."""
    return np.random.default_rng(20_260_101).integers(0, vocab_size, (ROWS, ROW_TOKENS))


def factors(name: str, shape: tuple[int, ...]) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """What tensor `name` is multiplied by, float32 of its shape; depends on nothing but name and
    shape.

    Example: `factors("lm_head.weight", (2, 2))` is the same array in trainer and generator, within
    [0.95, 1.05).
    """
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    uniform = np.random.default_rng(seed).random(shape, dtype=np.float32)
    return (1.0 + PERTURBATION * (2.0 * uniform - 1.0)).astype(np.float32)


def offsets(name: str, shape: tuple[int, ...]) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """What is added to tensor `name` once it is multiplied, float32: PERTURBATION * u of its shape
    for the second factor of an adapter, else a 0 without dimensions.

    An adapter begins with second factors of 0, which no multiplication moves.
    """
    if name.endswith(LORA_B):
        return factors(name, shape) - np.float32(1.0)
    return np.zeros((), np.float32)
