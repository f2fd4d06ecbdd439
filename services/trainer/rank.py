"""`python -m services.trainer.rank`: the process of a rank other than the first. It does what rank
0 says (rank_loop.py), until rank 0 is gone.

Its standard input begins with the recipe and is then silent; its end is rank 0's end, and this
process's. Signals to the process group are rank 0's to answer. It never touches queue or network.
"""

import importlib
import io
import os
import signal
import sys
import threading

from services.common.worker_process import HEADER, die_with_parent


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
    die_with_parent()
    header = sys.stdin.buffer.read(HEADER.size)
    frame = header + sys.stdin.buffer.read(*HEADER.unpack(header))
    threading.Thread(target=_end_with_input, daemon=True).start()
    # Not at the top: importing torch takes seconds, in which a signal would end this process.
    importlib.import_module("services.trainer.rank_loop").run(io.BytesIO(frame))


if __name__ == "__main__":
    main()
