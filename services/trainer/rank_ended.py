"""Why a trainer with several ranks ends as a whole."""


class RankEnded(RuntimeError):
    """A part of the policy is gone, with a rank or with the machine that it was on.

    what: what has happened, for people. status: with which a process of it ended; 2 is a mistake of
    the user's, which that process has said.
    """

    def __init__(self, what: str, *, status: int = 1, log: str = "its own log") -> None:
        super().__init__(
            f"{what}; the ranks hold the policy together, so the trainer ends, to be started again "
            f"from its last checkpoint; what the rank said is in {log}"
        )
        self.status = 2 if status == 2 else 1
        """The trainer's."""


class RankProcessEnded(RankEnded):
    """The process of a rank has ended before it was told to."""

    def __init__(self, rank: int, status: int, *, node: int = 0) -> None:
        where, log = (f" on node {node}", f"the log of node {node}") if node else ("", "this log")
        super().__init__(f"rank {rank}{where} ended with status {status}", status=status, log=log)
        self.rank = rank
        self.process_status = status
        """Negative for a signal."""
