"""A wall clock that is off, for one process: `python -m tests.chaos.clock +5 MODULE ARGUMENTS...`
runs a module as `python -m MODULE` does, on a host whose time was set wrong.

All Python code reads the wrong time; monotonic clocks are right. This is no library below Python:
libfaketime lies to the C code of gRPC too, which then hands times of the wrong clock to the kernel,
which has the right one. Waits of 0.1 s last 5 s or end at once, and time.sleep() fails, as on no
host of this world.
"""

import runpy
import sys
import time


def set_off(seconds: float) -> None:
    """From now on this process's wall clock is off by so much. Call it before other imports: they
    may keep the functions."""
    right_s, right_ns = time.time, time.time_ns
    vars(time)["time"] = lambda: right_s() + seconds
    vars(time)["time_ns"] = lambda: right_ns() + int(seconds * 1e9)


def command(argv: tuple[str, ...], seconds: float) -> tuple[str, ...]:
    """`python -m MODULE ...` with the clock off by so much, instead of any other amount.

    Example: `("python", "-m", "services.scorer", "recipe.toml")` and 5 are `("python", "-m",
    "tests.chaos.clock", "+5", "services.scorer", "recipe.toml")`.
    """
    python, dash_m, module, *arguments = argv
    if module == __spec__.name:
        _, module, *arguments = arguments
    return (python, dash_m, __spec__.name, f"{seconds:+g}", module, *arguments)


if __name__ == "__main__":
    _, off_by, name, *rest = sys.argv
    set_off(float(off_by))
    sys.argv = [name, *rest]
    runpy.run_module(name, run_name="__main__", alter_sys=True)
