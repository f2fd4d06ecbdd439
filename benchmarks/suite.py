"""All measurements: `make bench`, one after the other, then docs/benchmarks.md from their results.

    make bench                                        all: about three hours on two cores
    make bench NAMES="generator overhead"             these
    make bench NAMES=--missing                        those without a result: go on after a break
    python benchmarks/suite.py --list                 what there is, how long each takes

Each is a command of its own that prints a table and writes benchmarks/results/NAME.json; whatever
it prints is shown as it comes. Measure on a machine that does nothing else. The soak is apart
(`make soak`).
"""

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import measured

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Measurement:
    """One benchmark."""

    name: str
    """Of the script and of its result."""
    title: str
    minutes: int
    """On two cores that do nothing else, about."""
    environment: tuple[str, ...] = ()
    """What its command line begins with."""

    @property
    def command(self) -> str:
        """As a person types it."""
        return " ".join((*self.environment, "python", f"benchmarks/{self.name}.py"))

    @property
    def result(self) -> Path:
        """What it writes."""
        return measured.RESULTS / f"{self.name}.json"


KEEP_MEMORY = (
    "OMP_NUM_THREADS=1",
    "MALLOC_TRIM_THRESHOLD_=1073741824",
    "MALLOC_MMAP_THRESHOLD_=1073741824",
)

MEASUREMENTS = (
    Measurement("generator", "the generator service against vLLM alone", 10),
    Measurement("weights", "publishing weights", 10),
    Measurement("endtoend", "the demo from end to end", 65),
    Measurement("peer", "the demo by TRL, by its requests in flight", 10),
    Measurement("overhead", "what recording metrics costs", 10),
    Measurement("queue", "samples through the queue", 10),
    Measurement("trainer", "an optimizer step, and the planner", 10, KEEP_MEMORY),
    Measurement("wire", "token arrays on the wire", 1),
    Measurement("recorder", "a call of the recorder", 1),
    Measurement("aggregator", "what the aggregator takes in and answers", 20),
    Measurement("page", "the first view of a run of 10,000 steps x 150 keys", 4),
    Measurement("aggregator_away", "metrics while the aggregator is away", 10),
    Measurement("conversations", "what endless tools cost others", 5),
    Measurement("pacing", "what long groups cost", 10),
)


def run(measurement: Measurement) -> bool:
    """Run it in this interpreter's environment; whether it did well."""
    print(f"\n== {measurement.title}: {measurement.command}", flush=True)
    begin_s = time.monotonic()
    script = str(FOLDER / f"{measurement.name}.py")
    command = ["env", *measurement.environment, sys.executable, script]
    status = subprocess.run(command, cwd=measured.ROOT, check=False).returncode
    minutes = (time.monotonic() - begin_s) / 60
    print(f"== {measurement.name}: status {status}, {minutes:.1f} minutes", flush=True)
    return status == 0


def main() -> None:
    """Run what is wanted; the exit status is 1 when one has failed."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--missing", action="store_true", help="only those without a result")
    parser.add_argument("--list", action="store_true", help="list them and end")
    arguments = parser.parse_args()
    known = {each.name: each for each in MEASUREMENTS}
    if strange := sorted(set(arguments.names) - known.keys()):
        parser.error(f"no benchmark {', '.join(strange)}; there is {', '.join(known)}")
    if arguments.list:
        for each in MEASUREMENTS:
            print(f"{each.name:18}{each.minutes:4} min  {each.title}")
        return
    chosen = [known[name] for name in arguments.names] or list(MEASUREMENTS)
    if arguments.missing:
        chosen = [each for each in chosen if not each.result.exists()]
    failed = [each.name for each in chosen if not run(each)]
    subprocess.run([sys.executable, str(FOLDER / "report.py")], cwd=measured.ROOT, check=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
