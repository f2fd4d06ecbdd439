"""`headrace run` with fake services around the real aggregator and the real queue server.

`launch.py RECIPE [--fresh] [--set KEY=VALUE]…`; ends as the command would.
"""

import sys
from pathlib import Path

from rich.console import Console

from services.launcher import cli, plan, run

FAKE = Path(__file__).with_name("fake_service.py")


def argv_of(service: str) -> tuple[str, ...]:
    """The real aggregator, and fakes."""
    if service == "aggregator":
        return plan.python_module(service)
    return (sys.executable, str(FAKE), service)


if __name__ == "__main__":
    _, recipe, *words = sys.argv
    overrides = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    with cli.one_line_errors():
        status = run.run(
            Path(recipe),
            overrides=overrides,
            fresh="--fresh" in words,
            console=Console(),
            argv_of=argv_of,
        )
    sys.exit(status)
