"""Screenshots of each page, light and dark, of an invented run.

`python -m tests.browser.screenshots [FOLDER]` (`make screenshots`) writes overview-light.png and so
on, into docs/pictures by default; it needs playwright and a Chromium on the PATH. What it writes is
reduced to 256 colours, which no reader sees and which makes a third of the size.
"""

import argparse
import io
import shutil
import tempfile
from pathlib import Path

from PIL import Image

from services.aggregator.store import Store
from tests.browser.conftest import BROWSERS
from tests.browser.data import fill, serving
from tests.browser.test_pages import MARKS

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"

STEPS = 160
SETTLE_MS = 1000
"""A moment more than the last mark: fonts and hover states are at rest."""

WAIT_MS = 120_000

NUM_COLOURS = 256
MAX_BYTES = 200_000
"""Of one picture; a repository keeps each version of it for ever."""

WIDTH, HEIGHT = 1280, 860

STATES = {
    "rollouts": "rollouts/0.7.1.1%2F3?run=demo",
    "lineage": "lineage/0.321.1.1?run=demo",
    "metrics": "metrics?run=demo&smooth=0.8&compare=baseline",
    "runs": "runs?run=demo&beside=baseline",
}

DRAWN = MARKS | {
    "overview": ".overview-charts .chart:last-child .u-over",
    "metrics": ".slot:nth-child(3) .u-over",
    "time": ".chart .u-over",
    "rollouts": ".message",
    "lineage": ".way",
    "runs": ".recipe tbody tr",
}
"""What is there once all that the picture shows is."""


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=PICTURES)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    binary = next(filter(None, map(shutil.which, BROWSERS)), None)
    if binary is None:
        raise SystemExit(f"no Chromium is on the PATH; looked for {', '.join(BROWSERS)}")
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as data, sync_playwright() as playwright:
        store = Store.open(f"sqlite:///{data}/metrics.sqlite")
        fill(store, steps=STEPS)
        browser = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        with serving(store) as address:
            for scheme in ("light", "dark"):
                context = browser.new_context(
                    viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme
                )
                for name, mark in DRAWN.items():
                    page = context.new_page()
                    page.goto(f"{address}/#/{STATES.get(name, f'{name}?run=demo')}")
                    page.locator(mark).first.wait_for(timeout=WAIT_MS)
                    page.wait_for_timeout(SETTLE_MS)
                    path = folder / f"{name}-{scheme}.png"
                    path.write_bytes(reduced(page.screenshot(timeout=WAIT_MS)))
                    print(f"{path}: {path.stat().st_size:,} bytes", flush=True)
                    page.close()
                context.close()
        browser.close()
        store.close()


def reduced(picture: bytes) -> bytes:
    """The picture with few colours. Raises ValueError where it is too large all the same."""
    whole = Image.open(io.BytesIO(picture)).convert("RGB")
    # By coverage, or the few dots of a rare colour would get that of something else.
    few = whole.quantize(NUM_COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    written = io.BytesIO()
    few.save(written, "PNG", optimize=True)
    if len(written.getvalue()) > MAX_BYTES:
        raise ValueError(f"a picture has {len(written.getvalue()):,} bytes, above {MAX_BYTES:,}")
    return written.getvalue()


if __name__ == "__main__":
    main()
