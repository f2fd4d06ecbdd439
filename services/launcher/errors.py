"""How a run ends when it does not end well, apart from services.common.errors.UserError."""


class RunFailed(RuntimeError):
    """The run cannot go on; one line that says why and where to look. Exit status 1."""


class Interrupted(Exception):
    """A signal asked for the end. Exit status 130."""
