"""For all tests of the generator."""

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def plain_tracebacks() -> Iterator[None]:
    """structlog's pretty ones take seconds to draw."""
    renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[structlog.processors.add_log_level, renderer])
    yield
    structlog.reset_defaults()
