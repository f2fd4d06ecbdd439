"""A child for tests of supervision: `fake_child.py BEHAVIOUR [FOLDER]`, standard library only."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main(behaviour: str, folder: Path) -> int:
    """Behave as told; the exit status."""
    with (folder / "pids").open("a") as pids:
        pids.write(f"{os.getpid()}\n")
        if behaviour in ("parent", "stubborn parent"):
            grandchild = subprocess.Popen([sys.executable, "-I", "-S", "-c", SLEEP])
            pids.write(f"{grandchild.pid}\n")
    match behaviour:
        case "done":
            return 0
        case "mistake":
            print("starting", file=sys.stderr)
            print("error: model.path: there is no folder x; give one", file=sys.stderr)
            return 2
        case "fenced":
            print("error: attempt 2 has taken over", file=sys.stderr)
            return 75
        case "crash":
            raise RuntimeError("the engine is dead")
        case "crash twice":
            if len((folder / "pids").read_text().splitlines()) < 3:
                return 1
        case "stubborn parent":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / "up").touch()
    time.sleep(600)
    return 0


SLEEP = "import time; time.sleep(600)"

if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
