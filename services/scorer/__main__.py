"""`python -m services.scorer RECIPE`."""

import typer

from services.common.command import service_command
from services.scorer.service import main

if __name__ == "__main__":
    typer.run(
        service_command(
            "scorer", main, "Score groups of rollouts with the recipe's reward functions."
        )
    )
