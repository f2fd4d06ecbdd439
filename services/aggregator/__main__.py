"""`python -m services.aggregator RECIPE`."""

import gc

import typer

from services.aggregator.service import main
from services.common.command import service_command

if __name__ == "__main__":
    # What was imported stays. Looking through it in every full collection would hold up batches
    # and queries for as long as several queries take.
    gc.collect()
    gc.freeze()
    # Batches are tuples by the ten thousand, and none of them are in cycles.
    gc.set_threshold(100_000, 20, 20)
    typer.run(service_command("aggregator", main, "Take metrics, keep them, answer questions."))
