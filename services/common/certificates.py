"""The certificate of this service, and of those who sign others': read again when they change.

Who renews certificates in a cluster (cert-manager, for one) rewrites the files that a pod has
mounted. A new connection always uses what is there then; connections that exist live on, at most
as long as the server lets them (grpc_kit.CONNECTION_AGE_S).
"""

import ssl
import threading
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from services.common.config import Network
from services.common.errors import UserError
from services.common.tokens import file_state

KEYS = ("tls_cert_file", "tls_key_file", "tls_ca_file")


@dataclass(frozen=True)
class Pems:
    """The three files' content."""

    cert: bytes
    key: bytes = field(repr=False)
    ca: bytes


class Certificates:
    """Three PEM files that belong together. Raises UserError when they do not, or cannot be read,
    at first; later that is logged, and what was read before stays. Thread-safe."""

    def __init__(self, cert: Path, key: Path, ca: Path) -> None:
        self.paths = (cert, key, ca)
        self._lock = threading.Lock()
        self._states = self._look()
        self._pems = self._read()

    def current(self) -> Pems:
        """What the files hold now: the same object as before unless they have changed."""
        with self._lock:
            states = self._look()
            if states != self._states:
                try:
                    self._pems = self._read()
                except UserError as error:
                    log = structlog.get_logger()
                    log.error("the certificates stay as they were", why=str(error))
                else:
                    structlog.get_logger().info("certificates read again")
                self._states = states
            return self._pems

    def load_into(self, context: ssl.SSLContext) -> None:
        """Give a context of ours the certificate and the authorities of the files."""
        cert, key, ca = self.paths
        context.load_cert_chain(cert, key, password="")
        context.load_verify_locations(ca)

    def _look(self) -> tuple[tuple[int, ...], ...]:
        return tuple(file_state(path) for path in self.paths)

    def _read(self) -> Pems:
        while True:
            pems = self._read_once()
            self._check()
            # Renewed in between, a certificate may have been read without its key.
            if self._read_once() == pems:
                return pems

    def _read_once(self) -> Pems:
        content = []
        for name, path in zip(KEYS, self.paths, strict=True):
            try:
                content.append(path.read_bytes())
            except OSError as error:
                raise UserError(f"network.{name}: cannot be read: {error}") from None
        return Pems(*content)

    def _check(self) -> None:
        cert, key, ca = self.paths
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # A key with a passphrase would ask for it on the terminal.
            context.load_cert_chain(cert, key, password="")
        except (OSError, ValueError) as error:
            raise UserError(
                f"network.tls_cert_file, network.tls_key_file: {cert} and {key} are no PEM "
                f"certificate and its key without a passphrase ({error})"
            ) from None
        try:
            context.load_verify_locations(ca)
        except (OSError, ValueError) as error:
            raise UserError(
                f"network.tls_ca_file: {ca} holds no PEM certificates ({error})"
            ) from None


def certificates_of(network: Network) -> Certificates | None:
    """What is configured; None where TLS is not. Raises UserError."""
    files = [getattr(network, name) for name in KEYS]
    if None in files:
        # Recipes with some of them only are refused.
        return None
    cert, key, ca = map(Path, files)
    return Certificates(cert, key, ca)


def client_context(network: Network) -> ssl.SSLContext | None:
    """For HTTPS to another service of the run; None where TLS is not configured. Raises
    UserError."""
    certificates = certificates_of(network)
    if certificates is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    certificates.load_into(context)
    return context
