"""Certificates for tests: an authority, and what it signs, as cert-manager mounts it."""

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from services.common.config import Network

LOCAL = ("localhost", "127.0.0.1")


class Authority:
    """Signs certificates, which are good for an hour.

    `write(folder)` makes folder/tls.crt, tls.key and ca.crt, at once as a Secret's mount changes:
    by a rename of what a link points to.
    """

    def __init__(self, name: str = "tests") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        self._cert = (
            self._builder(self._name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self._written = 0

    @property
    def pem(self) -> bytes:
        """Its own certificate."""
        return self._cert.public_bytes(serialization.Encoding.PEM)

    def write(
        self,
        folder: Path,
        *,
        name: str = "service",
        hosts: Sequence[str] = LOCAL,
        trusted: Sequence["Authority"] = (),
    ) -> Path:
        """A new certificate for `hosts`, which trusts this authority, or `trusted`; the folder."""
        key = ec.generate_private_key(ec.SECP256R1())
        cert = (
            self._builder(_named(name), key)
            .add_extension(x509.SubjectAlternativeName(list(map(_host, hosts))), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        folder.mkdir(parents=True, exist_ok=True)
        self._written += 1
        data = folder / f"..{name}.{id(self)}.{self._written}"
        data.mkdir()
        (data / "tls.crt").write_bytes(cert.public_bytes(serialization.Encoding.PEM))
        (data / "tls.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        (data / "ca.crt").write_bytes(b"".join(each.pem for each in trusted or (self,)))
        fresh = folder / "..fresh"
        fresh.symlink_to(data.name)
        fresh.rename(folder / "..data")
        for file in ("tls.crt", "tls.key", "ca.crt"):
            if not (folder / file).is_symlink():
                (folder / file).symlink_to(f"..data/{file}")
        return folder

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
        )


def keys_of(folder: Path) -> dict[str, str]:
    """The recipe's keys of `network` for what Authority.write has written."""
    return {
        "tls_cert_file": str(folder / "tls.crt"),
        "tls_key_file": str(folder / "tls.key"),
        "tls_ca_file": str(folder / "ca.crt"),
    }


def network_of(folder: Path, *, token_file: Path | None = None) -> Network:
    """A network that uses them."""
    token = {} if token_file is None else {"token_file": str(token_file)}
    return Network.model_validate(keys_of(folder) | token)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
