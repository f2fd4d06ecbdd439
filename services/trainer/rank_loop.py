"""A rank other than the first, once its process is set up (rank.py): the model's part, and the loop
that does what rank 0 says."""

import json
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import structlog

from services.common.config import Recipe
from services.common.errors import UserError
from services.common.lifecycle import configure_logging
from services.common.worker_process import HEADER
from services.trainer import messages
from services.trainer.rank_files import Snapshots, follow
from services.trainer.rank_learner import RankLearner
from services.trainer.ranks import Command, Place, place_of


class Rank:
    """One rank and its loop.

    waits_for: rank 0's commands. unblocked_by: rank 0, and its end.
    """

    def __init__(self, recipe: Recipe, place: Place) -> None:
        self._learner = RankLearner(recipe, place)
        self._group = self._learner.group
        self._snapshots = Snapshots()

    def run(self) -> None:
        """Do what comes, for ever."""
        threading.Thread(target=self._save, name="saving", daemon=True).start()
        while True:
            command, payload = self._group.receive()
            self._do(command, payload)

    def _do(self, command: Command, payload: bytes) -> None:
        learner = self._learner
        match command:
            case Command.ACCUMULATE:
                learner.accumulate(messages.to_row(self._group.receive_own()))
            case Command.FINISH:
                learner.finish()
            case Command.ABANDON:
                learner.abandon()
            case Command.WEIGHTS:
                learner.gather(messages.to_kind(payload))
            case Command.CANARY:
                rows, _ = messages.to_rows(payload)
                learner.canary_logprobs(rows)
            case Command.PERTURBED:
                rows, path = messages.to_rows(payload)
                learner.perturbed_logprobs(path, rows)
            case Command.SNAPSHOT:
                self._snapshots.put(learner.snapshot())
            case Command.RESTORE:
                learner.restore(messages.to_path(payload))

    def _save(self) -> None:
        with ends_the_process():
            follow(self._group, self._snapshots)


@contextmanager
def ends_the_process() -> Iterator[None]:
    """Whatever is raised ends the process, other threads included, with the reason in the log."""
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(2)
    except BaseException:
        structlog.get_logger().error(
            "rank failed", rank=os.environ.get("RANK"), traceback=traceback.format_exc()
        )
        sys.stderr.flush()
        os._exit(1)


def run(recipe_frame: BinaryIO) -> None:
    """Read the recipe and follow rank 0, for ever."""
    configure_logging()
    structlog.contextvars.bind_contextvars(rank=int(os.environ["RANK"]))
    with ends_the_process():
        (length,) = HEADER.unpack(recipe_frame.read(HEADER.size))
        recipe = Recipe.model_validate(json.loads(recipe_frame.read(length)))
        Rank(recipe, place_of(os.environ)).run()
