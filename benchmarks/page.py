"""How long the page's first view takes, in Chromium, of a stored run of 10,000 steps x 150 keys.

    python benchmarks/page.py [--steps 10000] [--keys 150] [--times 5] [--database FOLDER]

Prints a table and writes benchmarks/results/page.json: by page the seconds from the navigation to
the first paint and to the moment when all of the first view is drawn, the number of queries and the
bytes of their answers; medians and the worst of `times` loads, each with an empty cache. Making the
run takes about a minute; `--database` keeps it in a folder and uses it again. The aggregator's
application, the browser and the driver share the machine.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from services.aggregator.store import Store  # noqa: E402
from tests.browser.conftest import BROWSERS  # noqa: E402
from tests.browser.data import serving  # noqa: E402
from tests.browser.first_view import first_view  # noqa: E402
from tests.browser.long_run import KEYS, STEPS, fill_long  # noqa: E402

RESULT = Path(__file__).parent / "results" / "page.json"

PAGES = ("overview", "metrics")


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--keys", type=int, default=KEYS)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--database", type=Path, help="a folder that keeps the run")
    options = parser.parse_args()
    binary = next(filter(None, map(shutil.which, BROWSERS)), None)
    if binary is None:
        raise SystemExit(f"no Chromium is on the PATH; looked for {', '.join(BROWSERS)}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.database or Path(temporary)
        store, fill_s = _stored(folder, steps=options.steps, keys=options.keys)
        loads: dict[str, list[dict[str, Any]]] = {page: [] for page in PAGES}
        with sync_playwright() as playwright, serving(store) as address:
            browser = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])
            for _ in range(options.times):
                for page in PAGES:
                    context = browser.new_context(viewport={"width": 1440, "height": 900})
                    found = first_view(context, address, f"{page}?run=long")
                    loads[page].append(found._asdict())
                    context.close()
            browser.close()
        store.close()
    result = {
        "steps": options.steps,
        "keys": options.keys,
        "loads": options.times,
        "fill_s": fill_s,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "pages": {page: _summary(each) for page, each in loads.items()},
    }
    _print(result)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written: {RESULT}")


def _stored(folder: Path, *, steps: int, keys: int) -> tuple[Store, float | None]:
    """The run, and the seconds that making it took; None where it was there."""
    database = folder / f"page-{steps}-{keys}.sqlite"
    known = database.exists()
    store = Store.open(f"sqlite:///{database}")
    if known:
        return store, None
    begun_s = time.monotonic()
    fill_long(store, now_s=time.time(), steps=steps, keys=keys)
    return store, round(time.monotonic() - begun_s, 1)


def _summary(loads: list[dict[str, Any]]) -> dict[str, Any]:
    def median(name: str) -> float:
        return round(statistics.median(each[name] for each in loads), 3)

    return {
        "painted_s": median("painted_s"),
        "seen_s": median("seen_s"),
        "seen_s_worst": round(max(each["seen_s"] for each in loads), 3),
        "slowest_query_s": median("slowest_s"),
        "num_queries": loads[0]["num_queries"],
        "query_bytes": loads[0]["query_bytes"],
    }


def _print(result: dict[str, Any]) -> None:
    table = Table(title=f"First view of {result['steps']:,} steps x {result['keys']} keys")
    for column in ("page", "painted s", "seen s", "worst s", "slowest query s", "queries", "kB"):
        table.add_column(column, justify="left" if column == "page" else "right")
    for page, found in result["pages"].items():
        table.add_row(
            page,
            f"{found['painted_s']:.2f}",
            f"{found['seen_s']:.2f}",
            f"{found['seen_s_worst']:.2f}",
            f"{found['slowest_query_s']:.2f}",
            str(found["num_queries"]),
            f"{found['query_bytes'] / 1000:.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
