"""`python -m services.trainer.rank`: the process of a rank other than the first. It does what rank
0 says (rank_loop.py), until rank 0 is gone.

Its standard input begins with the recipe and is then silent; its end is rank 0's end, and this
process's. Signals to the process group are rank 0's to answer. It never touches queue or network.
"""

import ctypes
import importlib
import io
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1
"""Linux: the signal that a process gets when its parent ends (prctl(2))."""

HEADER_BYTES = 8
"""Of the recipe's frame, big-endian: its length (services/common/worker_process.py)."""


def _end_with_input() -> None:
    """End at once when the input does, also in the middle of a collective."""
    while os.read(0, 1):
        pass
    os._exit(0)


def main() -> None:
    """Follow rank 0."""
    # Only rank 0 ends a run in order: a rank that went at its signal would break its last step.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    header = sys.stdin.buffer.read(HEADER_BYTES)
    frame = header + sys.stdin.buffer.read(int.from_bytes(header, "big"))
    threading.Thread(target=_end_with_input, daemon=True).start()
    # Not at the top: importing torch takes seconds, in which a signal would end this process.
    importlib.import_module("services.trainer.rank_loop").run(io.BytesIO(frame))


if __name__ == "__main__":
    main()
