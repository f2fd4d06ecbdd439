"""Mutual TLS of gRPC with certificates that are renewed while a service runs.

A server reads the files at each new connection. A channel of gRPC keeps the certificate that it was
made with, for ever; so a channel here is one of several: the first call after a renewal opens a new
one, and calls under way end on the old one. Nobody has to be restarted.
"""

import threading
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, cast

import grpc

from services.common.certificates import Certificates, Pems

C = TypeVar("C")


def server_credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Of a server that shows the present certificate at each new connection, and takes clients only
    with one that the present authorities have signed."""
    shown = certificates.current()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        pems = certificates.current()
        if pems is shown:
            return None
        shown = pems
        return _configuration(pems)

    # None means: as before. The stubs do not know it.
    fetch = cast(Callable[[], grpc.ServerCertificateConfiguration], renewed)
    return grpc.dynamic_ssl_server_credentials(
        _configuration(shown), fetch, require_client_authentication=True
    )


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(pems.key, pems.cert)], root_certificates=pems.ca
    )


def _client_credentials(pems: Pems) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)


class _Renewed(Generic[C]):
    """The channel for the present certificates, and the one before it."""

    def __init__(
        self, certificates: Certificates, open_channel: Callable[[grpc.ChannelCredentials], C]
    ) -> None:
        self._certificates, self._open = certificates, open_channel
        self._lock = threading.Lock()
        self._pems = certificates.current()
        self._channels = [open_channel(_client_credentials(self._pems))]

    def now(self) -> C:
        """The channel for a call that begins now."""
        pems = self._certificates.current()
        if pems is not self._pems:
            with self._lock:
                if pems is not self._pems:
                    # The one before the last has no calls: connections live far shorter than
                    # certificates. gRPC closes it once nobody refers to it.
                    fresh = self._open(_client_credentials(pems))
                    self._channels = [*self._channels[-1:], fresh]
                    self._pems = pems
        return self._channels[-1]

    def all(self) -> list[C]:
        """Those that are open."""
        return self._channels


class _Calls:
    """A method's calls, each on the channel of its moment."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._make()(*arguments, **options)

    def with_call(self, *arguments: Any, **options: Any) -> Any:
        return self._make().with_call(*arguments, **options)

    def future(self, *arguments: Any, **options: Any) -> Any:
        return self._make().future(*arguments, **options)


class _Methods:
    """The four ways to call, of both kinds of channels."""

    _renewed: _Renewed[Any]

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        """As gRPC has it."""
        return _Calls(lambda: self._renewed.now().unary_unary(*arguments, **options))

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        """As gRPC has it."""
        return _Calls(lambda: self._renewed.now().unary_stream(*arguments, **options))

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        """As gRPC has it."""
        return _Calls(lambda: self._renewed.now().stream_unary(*arguments, **options))

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        """As gRPC has it."""
        return _Calls(lambda: self._renewed.now().stream_stream(*arguments, **options))


class AioChannel(_Methods, grpc.aio.Channel):
    """An aio channel that uses the certificates of the moment."""

    _renewed: _Renewed[grpc.aio.Channel]

    def __init__(
        self,
        certificates: Certificates,
        open_channel: Callable[[grpc.ChannelCredentials], grpc.aio.Channel],
    ) -> None:
        self._renewed = _Renewed(certificates, open_channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Close all connections, after at most `grace` seconds for calls under way."""
        for channel in self._renewed.all():
            await channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Of the channel for new calls."""
        return self._renewed.now().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Of the channel for new calls."""
        await self._renewed.now().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait until the channel for new calls is connected."""
        await self._renewed.now().channel_ready()


class SyncChannel(_Methods, grpc.Channel):
    """A blocking channel that uses the certificates of the moment."""

    def __init__(
        self,
        certificates: Certificates,
        open_channel: Callable[[grpc.ChannelCredentials], grpc.Channel],
    ) -> None:
        self._renewed = _Renewed(certificates, open_channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        for channel in self._renewed.all():
            channel.close()

    def subscribe(self, callback: Any, try_to_connect: bool = False) -> None:
        """Tell of the connectivity of the channel for new calls."""
        self._renewed.now().subscribe(callback, try_to_connect=try_to_connect)

    def unsubscribe(self, callback: Any) -> None:
        """Tell no more."""
        for channel in self._renewed.all():
            channel.unsubscribe(callback)
