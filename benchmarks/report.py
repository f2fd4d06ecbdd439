"""Write docs/benchmarks.md from benchmarks/results/*.json: `python benchmarks/report.py`.

Only what has been measured is in it; what has no result is listed with its command. A section's
text comes from report_sections.py.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import measured
import report_sections
from suite import MEASUREMENTS, Measurement

PAGE = measured.ROOT / "docs" / "benchmarks.md"

HEAD = """# Measurements

<!-- Written by benchmarks/report.py from benchmarks/results/*.json; `make bench` measures anew. -->

Each section has one command that repeats it, the ratio to what one would otherwise use first, and
medians with the least and the greatest of the runs beside them. `make bench` runs them all,
`make bench NAMES="generator overhead"` some. They need a machine that does nothing else: the load
averages below are those before each began. `make soak` is the soak, beside which others may work.
"""

SOAK = Measurement("soak", "20,000 groups with restarts", 65)


def about_lines(results: dict[str, dict[str, Any]]) -> list[str]:
    """Machine, date and versions of each result, those that agree in one line."""
    found: dict[str, list[str]] = {}
    for name, result in results.items():
        about = result.get("about")
        if about is None:
            continue
        versions = ", ".join(f"{key} {value}" for key, value in about["versions"].items())
        line = (
            f"{about['cpu']}, {about['cores']} cores, {about['memory_gib']} GiB, "
            f"{about['system']}, Python {about['python']}, {versions}; {about['date']}"
        )
        found.setdefault(line, []).append(f"{name} (load {about['load_before']})")
    return [f"- {line}: {', '.join(names)}." for line, names in found.items()]


def page(results: dict[str, dict[str, Any]]) -> str:
    """The page's text."""
    parts = [HEAD]
    if lines := about_lines(results):
        parts.append("\n".join(["Measured on", "", *lines]) + "\n")
    missing = []
    for each in (*MEASUREMENTS, SOAK):
        write = report_sections.SECTIONS.get(each.name)
        if write is None:
            continue
        if each.name not in results:
            missing.append(f"- {each.title}: `{each.command}`, about {each.minutes} minutes")
            continue
        text = write(results[each.name])
        parts.append(f"## {_title(each)}\n\n`{each.command}`\n\n{text}\n")
    if missing:
        parts.append("\n".join(["## Not measured yet", "", *missing]) + "\n")
    return "\n".join(parts)


def _title(measurement: Measurement) -> str:
    return measurement.title[0].upper() + measurement.title[1:]


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """All results by name."""
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    return {
        file.stem: json.loads(file.read_text())
        for file in files
        if not file.name.endswith(".runs.json")
    }


def main() -> None:
    """Read and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--results", type=Path, default=measured.RESULTS, help="folder of them")
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args()
    arguments.page.write_text(page(read(arguments.results)))
    print(f"written: {arguments.page}")


if __name__ == "__main__":
    main()
