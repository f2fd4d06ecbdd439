"""How a page comes up in the browser: when its first view is there, and what it asked for."""

from typing import Any, NamedTuple

MARK = "headrace-first-view"
"""The page's own mark, made when all of its first view is drawn."""

QUERIES = "/api/v1/"


class FirstView(NamedTuple):
    """What one load of a page took."""

    painted_s: float
    """From the navigation to the first paint of anything."""
    seen_s: float
    """From the navigation to the mark."""
    num_queries: int
    """Requests to the API before the mark, the stream excepted."""
    query_bytes: int
    """Their bodies, decoded."""
    slowest_s: float
    """The longest of them."""


def first_view(context: Any, address: str, state: str, *, timeout_s: float = 60.0) -> FirstView:
    """Load a page anew and wait for its mark."""
    page = context.new_page()
    page.goto(f"{address}/#/{state}")
    page.locator("html[data-viewed]").wait_for(state="attached", timeout=timeout_s * 1000)
    found = page.evaluate(
        """mark => {
            const seen = performance.getEntriesByName(mark)[0].startTime;
            const paint = performance.getEntriesByName("first-contentful-paint")[0];
            const queries = performance.getEntriesByType("resource").filter(
                each => each.name.includes("/api/v1/") && !each.name.includes("/stream")
                    && each.startTime < seen && each.responseEnd > 0);
            return {
                seen,
                painted: paint ? paint.startTime : null,
                number: queries.length,
                bytes: queries.reduce((sum, each) => sum + each.decodedBodySize, 0),
                slowest: Math.max(0, ...queries.map(each => each.duration)),
            };
        }""",
        MARK,
    )
    page.close()
    assert found["painted"] is not None, "the browser has not painted"
    return FirstView(
        painted_s=found["painted"] / 1000,
        seen_s=found["seen"] / 1000,
        num_queries=found["number"],
        query_bytes=found["bytes"],
        slowest_s=found["slowest"] / 1000,
    )
