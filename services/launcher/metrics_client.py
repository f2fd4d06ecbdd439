"""The aggregator's REST interface as the launcher reads it. An aggregator that is away answers
nothing.
"""

import asyncio
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

from services.common.tokens import Tokens

TIMEOUT_S = 5.0
"""Of one query."""

MAX_POINTS = 10_000
"""Steps of a history, one by one; of a longer run, windows of several steps."""

RETRY_EVERY_S = 0.2
"""Pause between two tries to reach an aggregator that is starting."""


@dataclass(frozen=True)
class Point:
    """One value of a history."""

    step: int
    value: float | None
    """None where nothing was measured in this step."""


class MetricsClient:
    """Queries about one run. Every method raises httpx.HTTPError when the aggregator does not
    answer.
    """

    def __init__(
        self, url: str, *, run: str, tokens: Tokens | None, tls: ssl.SSLContext | None = None
    ) -> None:
        headers = {} if tokens is None else {"Authorization": f"Bearer {tokens.sent}"}
        # The aggregator is on this machine: a proxy of the environment must not come between.
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=TIMEOUT_S,
            trust_env=False,
            verify=True if tls is None else tls,
        )
        self._run = f"/api/v1/runs/{quote(run)}"

    async def latest(self, match: str) -> dict[str, float]:
        """The newest value of each key that matches a regular expression, by the key's default
        reduction.
        """
        answer = await self._get(f"{self._run}/metrics", match=match)
        items = () if answer is None else answer["metrics"]
        return {item["key"]: item["value"] for item in items if item["value"] is not None}

    async def history(self, key: str, *, reduce: str | None = None) -> list[Point]:
        """One value a step, oldest first; empty while nothing is known of the key."""
        parameters = {"axis": "step", "max_points": str(MAX_POINTS), "limit": str(MAX_POINTS)}
        if reduce is not None:
            parameters["reduce"] = reduce
        answer = await self._get(f"{self._run}/metrics/{quote(key)}", **parameters)
        points = () if answer is None else answer["points"]
        return [Point(step=int(point["x"]), value=point["value"]) for point in points]

    async def forget_run(self) -> bool:
        """Have the aggregator forget all that it knows of the run, as soon as it answers; True."""
        while True:
            try:
                answer = await self._http.delete(self._run)
            except httpx.TransportError:
                await asyncio.sleep(RETRY_EVERY_S)
                continue
            if answer.status_code != httpx.codes.NOT_FOUND:
                answer.raise_for_status()
            return True

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _get(self, path: str, **parameters: str) -> Any:
        """The answer's JSON, or None where the run or the key is not known (yet)."""
        answer = await self._http.get(path, params=parameters)
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        answer.raise_for_status()
        return answer.json()
