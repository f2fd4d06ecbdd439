"""Reward functions as users write them, right and wrong."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import numpy as np


def length(texts: list[str]) -> list[float]:
    return [float(len(text)) for text in texts]


def everything(**kwargs: Any) -> list[float]:
    Path(kwargs["path"][0]).write_text(repr(sorted(kwargs.items())))
    return [0.0] * len(kwargs["texts"])


def scripted(texts: list[str]) -> Any:
    """Says what the texts say: "None" abstains."""
    named = {"None": None, "nan": float("nan"), "inf": float("inf"), "True": True}
    return [named[text] if text in named else float(text) for text in texts]


def returns(texts: list[str], value: Any) -> Any:
    return value


def returns_array(texts: list[str], two_d: bool = False) -> Any:
    array = np.arange(len(texts), dtype=np.float32)
    return array[:, None] if two_d else array


def raises(texts: list[str]) -> list[float]:
    raise ValueError("a bug of the user")


def hangs(texts: list[str]) -> list[float]:
    while True:
        pass


def sleeps(texts: list[str]) -> list[float]:
    time.sleep(1.0)
    return [0.0] * len(texts)


def logs(texts: list[str], log_metric: Any) -> list[float]:
    for text in texts:
        log_metric("chars", len(text))
    log_metric("nan", np.float32("nan"))
    return [0.0] * len(texts)


async def async_logs(texts: list[str], log_metric: Any) -> list[float]:
    return logs(texts, log_metric)


def logs_and_raises(log_metric: Any, **kwargs: Any) -> list[float]:
    log_metric("chars", 1)
    raise ValueError("after it")


def kills(texts: list[str]) -> list[float]:
    os._exit(9)


def waits_for_file(texts: list[str], path: str) -> list[float]:
    Path(f"{path}.begun-{os.getpid()}").touch()
    while not os.path.exists(path):
        time.sleep(0.01)
    return [float(i) for i in range(len(texts))]


def needs_column(texts: list[str], solution: list[str]) -> list[float]:
    return [float(text == right) for text, right in zip(texts, solution, strict=True)]


async def async_length(texts: list[str], completions: list[Any]) -> Any:
    await asyncio.sleep(0)
    completions.clear()
    return np.array([len(text) for text in texts])


async def async_hangs(texts: list[str]) -> list[float]:
    await asyncio.Event().wait()
    return []


async def async_stubborn(texts: list[str]) -> list[float]:
    for _ in range(3):
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            continue
    return []


async def async_raises(texts: list[str]) -> list[float]:
    raise ValueError("a bug of the user")


class Judge:
    def __call__(self, texts: list[str]) -> list[int]:
        return [1] * len(texts)

    async def grade(self, texts: list[str]) -> list[int]:
        return [2] * len(texts)


judge = Judge()
not_a_function = 7
