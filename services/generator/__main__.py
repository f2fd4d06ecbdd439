"""`python -m services.generator RECIPE`."""

import typer

from services.common.command import service_command
from services.generator.service import main

HELP = "Turn requests into groups of rollouts, with vLLM."

if __name__ == "__main__":
    typer.run(service_command("generator", main, HELP))
