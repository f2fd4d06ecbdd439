"""`python -m services.aggregator RECIPE`."""

import typer

from services.aggregator.service import main
from services.common.command import service_command

if __name__ == "__main__":
    typer.run(service_command("aggregator", main, "Take metrics, keep them, answer questions."))
