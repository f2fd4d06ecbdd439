"""The errors that decide how a process ends."""

FENCED_STATUS = 75
"""Exit status of a trainer that another trainer of the same run has replaced: not to be
restarted."""

STOPPED_STATUS = 143
"""Exit status of a trainer with several nodes that was asked to stop before the end of its run, 128
+ SIGTERM as of a process that is ended by it: a Job that saw 0 would take the run for complete."""


class UserError(ValueError):
    """What the user has to change, in one line that says what is wrong, where, and what to do;
    exit status 2."""


class Fenced(RuntimeError):
    """A newer attempt of this run has taken over; exit status FENCED_STATUS."""


class EndedWith(RuntimeError):
    """An end in order whose exit status is not 0; the message says why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status
