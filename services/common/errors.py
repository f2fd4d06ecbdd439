"""The errors that decide how a process ends."""

FENCED_STATUS = 75
"""Exit status of a trainer that another trainer of the same run has replaced: not to be
restarted."""


class UserError(ValueError):
    """What the user has to change, in one line that says what is wrong, where, and what to do;
    exit status 2."""


class Fenced(RuntimeError):
    """A newer attempt of this run has taken over; exit status FENCED_STATUS."""
