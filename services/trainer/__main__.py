"""`python -m services.trainer RECIPE [--node N]`."""

import typer

from services.common.command import service_command_of_nodes
from services.trainer.service import main

HELP = "Turn scored samples into policy versions; owns the dataset cursor."

if __name__ == "__main__":
    typer.run(service_command_of_nodes("trainer", main, HELP))
