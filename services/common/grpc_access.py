"""Who may call a gRPC server, and how often: interceptors for both sides.

Both refuse before the servicer sees the request; a call without a token is not even decoded.
"""

import inspect
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc

from services.common.grpc_errors import abort
from services.common.rates import Rates
from services.common.tokens import Tokens

Continue = Callable[[Any], Awaitable[Any]]


class RequireToken(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses every call that does not carry an accepted token: UNAUTHENTICATED."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    async def intercept_service(self, continuation: Continue, details: Any) -> Any:
        """The method's handler, or one that refuses."""
        given = next((v for k, v in details.invocation_metadata if k == "authorization"), "")
        scheme, _, token = given.partition(" ")
        if scheme == "Bearer" and self._tokens.accepts(token):
            return await continuation(details)

        async def refuse(_request: Any, context: Any) -> NoReturn:
            await abort(
                context,
                grpc.StatusCode.UNAUTHENTICATED,
                "UNAUTHENTICATED",
                "a bearer token is needed: set network.token_file to the file that the server uses",
            )

        return _refusing(await continuation(details), refuse)


class LimitRate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls of a peer's address beyond a rate: RESOURCE_EXHAUSTED with RetryInfo."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._rates = Rates(per_s)

    async def intercept_service(self, continuation: Continue, details: Any) -> Any:
        """The method's handler, which counts the call first."""
        handler = await continuation(details)
        if handler is None:  # no such method: answered without a servicer
            return None
        unary = not handler.response_streaming
        kind = _kind(handler)
        behaviour = getattr(handler, kind)
        # The address is known only once the call is being handled.
        limited = self._unary(behaviour) if unary else self._streaming(behaviour)
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(limited, handler.request_deserializer, handler.response_serializer)

    def _unary(self, behaviour: Any) -> Any:
        async def limited(request: Any, context: Any) -> Any:
            await self._count(context)
            answer = behaviour(request, context)
            return await answer if inspect.isawaitable(answer) else answer

        return limited

    def _streaming(self, behaviour: Any) -> Any:
        async def limited(request: Any, context: Any) -> Any:
            await self._count(context)
            answers = behaviour(request, context)
            if inspect.isawaitable(answers):  # writes its answers to the context
                await answers
                return
            async with aclosing(answers):  # what it holds is free as soon as the call is cancelled
                async for answer in answers:
                    yield answer

        return limited

    async def _count(self, context: Any) -> None:
        wait_s = self._rates.take(address_of(context.peer()))
        if wait_s:
            await abort(
                context,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "RATE_LIMITED",
                f"more than network.max_requests_per_s = {self._per_s:g} calls a second from this "
                f"address; try again in {wait_s:.3f} s",
                retry_after_s=wait_s,
            )


def address_of(peer: str) -> str:
    """A peer's address without its port: "ipv4:10.0.0.7:41234" is "ipv4:10.0.0.7"."""
    return peer.rpartition(":")[0] if peer.startswith("ipv") else peer


def _kind(handler: Any) -> str:
    words = {True: "stream", False: "unary"}
    return f"{words[handler.request_streaming]}_{words[handler.response_streaming]}"


def _refusing(handler: Any, refuse: Any) -> Any:
    """A handler of the same kind that refuses, without decoding; of no handler a unary one."""
    kind = "unary_unary" if handler is None else _kind(handler)
    return getattr(grpc, f"{kind}_rpc_method_handler")(refuse)


# The client's side. Requests are one message in all our services, so only calls of that kind carry
# the token.


def _authorised(metadata: Any, tokens: Tokens) -> tuple[tuple[str, Any], ...]:
    return (*(metadata or ()), ("authorization", f"Bearer {tokens.sent}"))


class _AioUnary(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        metadata = grpc.aio.Metadata(*_authorised(details.metadata, self._tokens))
        return await continuation(details._replace(metadata=metadata), request)


class _AioStream(grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    async def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        metadata = grpc.aio.Metadata(*_authorised(details.metadata, self._tokens))
        return await continuation(details._replace(metadata=metadata), request)


def aio_interceptors(tokens: Tokens | None) -> list[Any]:
    """What makes the calls of an aio channel carry the token."""
    return [] if tokens is None else [_AioUnary(tokens), _AioStream(tokens)]


class _Sync(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[type-arg]
    grpc.UnaryStreamClientInterceptor,  # type: ignore[type-arg]
):
    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(_CallDetails(details, self._tokens), request)

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(_CallDetails(details, self._tokens), request)


class _CallDetails(grpc.ClientCallDetails):
    """A call's details with the token added."""

    def __init__(self, details: Any, tokens: Tokens) -> None:
        self.method = details.method
        self.timeout = details.timeout
        self.metadata = _authorised(details.metadata, tokens)
        self.credentials = details.credentials
        self.wait_for_ready = details.wait_for_ready
        self.compression = details.compression


def with_token(channel: grpc.Channel, tokens: Tokens | None) -> grpc.Channel:
    """A blocking channel whose calls carry the token."""
    return channel if tokens is None else grpc.intercept_channel(channel, _Sync(tokens))
