"""Regular expressions that users write: RE2's, as in Prometheus. They have no look-around and no
back-references, and take time linear in the text, where Python's may take for ever.
"""

from typing import Any

import re2

MAX_LENGTH = 4000
"""Characters of an expression."""

MAX_MEMORY_BYTES = 4 << 20
"""Of a compiled expression; a larger one is refused."""


class BadPattern(ValueError):
    """What is no regular expression, or too large a one."""


class Pattern:
    """A compiled expression. Raises BadPattern."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_LENGTH:
            raise BadPattern(f"a regular expression of more than {MAX_LENGTH} characters")
        options = re2.Options()
        options.log_errors = False
        options.max_mem = MAX_MEMORY_BYTES
        try:
            self._compiled: Any = re2.compile(text, options)
        except re2.error as error:
            reason = error.args[0]
            said = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
            raise BadPattern(f"{text[:80]!r} is not a regular expression here: {said}") from None

    def search(self, text: str) -> bool:
        """Whether it matches anywhere."""
        return self._compiled.search(text) is not None

    def fullmatch(self, text: str) -> bool:
        """Whether it matches all of it."""
        return self._compiled.fullmatch(text) is not None
