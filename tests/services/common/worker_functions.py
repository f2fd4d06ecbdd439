"""Functions that tests call in worker processes: well-behaved and not."""

import math
import os
import re
import subprocess
import sys
import time
from typing import Any

import numpy as np


def echo(**kwargs: Any) -> dict[str, Any]:
    return kwargs


def numbers() -> list[Any]:
    return [math.nan, math.inf, -math.inf, None, True, np.float32(0.5), np.int64(7), np.bool_(True)]


def array() -> Any:
    return np.array([[1.0, 2.0], [3.0, math.nan]])


def chatty() -> str:
    print("to stdout")
    sys.stdout.write("no newline")
    os.write(1, b"raw bytes")
    subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
    return repr(sys.stdin.read())


def pid() -> int:
    return os.getpid()


def wait_for(path: str) -> int:
    while not os.path.exists(path):
        time.sleep(0.005)
    return os.getpid()


def endless(path: str | None = None) -> None:
    if path is not None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(f"{path}.part", "w") as out:
            out.write(f"{os.getpid()} {child.pid}")
        os.rename(f"{path}.part", path)
    while True:
        pass


def holds_the_gil() -> bool:
    return re.match(r"(a+)+$", "a" * 60 + "b") is None


def fails() -> None:
    raise KeyError("no such thing")


def leaves() -> None:
    sys.exit(4)


def dies() -> None:
    os._exit(3)


def unsendable() -> object:
    return object()


STORED: dict[str, Any] = {}


def store(key: str, value: Any) -> None:
    STORED[key] = value


def stored(key: str) -> Any:
    return STORED.get(key)


def nap(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def fails_at_length() -> None:
    raise ValueError("first line\nsecond line")
