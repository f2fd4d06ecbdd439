"""What one caller may cost the REST interface: requests a second, bytes of a body, time to send it.

Pure ASGI, before everything else: a refused request reaches neither the application nor the store.
"""

import asyncio
import math

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.aggregator.api import problems
from services.common.rates import Rates

EXEMPT = ("/healthz", "/readyz")
"""Probes answer however much others ask."""

BODY_BYTES = 1 << 20
"""Largest body of a request; ours are far smaller."""

BODY_WITHIN_S = 20.0
"""Time for a body to arrive."""


class Limits:
    """Refuses what is too often (429), too large (413) or too slow (408)."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        per_s: float,
        body_bytes: int = BODY_BYTES,
        body_within_s: float = BODY_WITHIN_S,
    ) -> None:
        self._app, self._per_s, self._rates = app, per_s, Rates(per_s)
        self._body_bytes, self._body_within_s = body_bytes, body_within_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or hand on a request whose body is there."""
        if scope["type"] != "http" or scope["path"] in EXEMPT:
            await self._app(scope, receive, send)
            return
        client = scope.get("client")
        wait_s = self._rates.take("" if client is None else client[0])
        if wait_s:
            refusal = problems.answer(
                429,
                f"more than network.max_requests_per_s = {self._per_s:g} requests a second from "
                f"this address; try again in {wait_s:.3f} s",
                {"Retry-After": str(math.ceil(wait_s))},
            )
            await refusal(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._body_within_s):
                body = await self._read(scope, receive)
        except TimeoutError:
            late = f"the request's body has not come within {self._body_within_s:g} s"
            await problems.answer(408, late, {"Connection": "close"})(scope, receive, send)
            return
        if body is None:
            large = f"the request's body is larger than {self._body_bytes} bytes"
            await problems.answer(413, large, {"Connection": "close"})(scope, receive, send)
            return
        handed = False

        async def replayed() -> Message:
            nonlocal handed
            if handed:
                return await receive()  # the client's end, for answers that go on
            handed = True
            return body

        await self._app(scope, replayed, send)

    async def _read(self, scope: Scope, receive: Receive) -> Message | None:
        """The whole body as one message, or that the client has gone; None when it is too large."""
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length) > self._body_bytes:
            return None
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return message
            body += message.get("body", b"")
            if len(body) > self._body_bytes:
                return None
            if not message.get("more_body", False):
                return {"type": "http.request", "body": bytes(body), "more_body": False}
