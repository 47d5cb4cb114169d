"""Certificates of one local stack, signed by an authority that ends with them."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from millrace.core.config import TlsConfig
from millrace.core.errors import ConfigError, reason_of
from millrace.wire.tls import SERVER_NAME

#: Longer than anybody runs a stack on one machine.
VALID = datetime.timedelta(days=365)
#: Clocks of one machine agree; this is for one that is set back.
EARLIER = datetime.timedelta(days=1)


def issue_certificates(folder: Path) -> TlsConfig:
    """Writes ca.crt, tls.crt and tls.key into a new `folder`; returns the settings that name them.

    The authority's own key is kept nowhere: nothing else can get a certificate of it. Only the
    user may read the service's key. Raises ConfigError if the folder can't be written.
    """
    authority, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    root = _certificate("millrace-ca", authority, "millrace-ca", authority, _root_extensions())
    service = _certificate("millrace", key, "millrace-ca", authority, _service_extensions())
    config = TlsConfig(
        ca_file=str(folder / "ca.crt"),
        cert_file=str(folder / "tls.crt"),
        key_file=str(folder / "tls.key"),
    )
    pem = serialization.Encoding.PEM
    with _named(folder):
        folder.mkdir(mode=0o700, parents=True)
        Path(config.ca_file).write_bytes(root.public_bytes(pem))
        Path(config.cert_file).write_bytes(service.public_bytes(pem))
        secret = Path(config.key_file)
        secret.touch(mode=0o600, exist_ok=False)
        secret.write_bytes(
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
    return config


def as_settings(config: TlsConfig) -> list[str]:
    """Returns the settings (`section.field=value`) of these files."""
    return [f"tls.{name}={path}" for name, path in asdict(config).items()]


def as_toml(config: TlsConfig) -> str:
    """Returns a settings file (`--config`) of these files."""
    return "\n".join(
        ["[tls]", *(f"{name} = {path!r}" for name, path in asdict(config).items()), ""]
    )


Extensions = list[tuple[x509.ExtensionType, bool]]  # with: who does not know it must refuse


def _root_extensions() -> Extensions:
    return [(x509.BasicConstraints(ca=True, path_length=0), True)]


def _service_extensions() -> Extensions:
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return [
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), False),
        (x509.ExtendedKeyUsage(uses), False),
    ]


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    signer: ec.EllipticCurvePrivateKey,
    extensions: Extensions,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(now + VALID)
    )
    for extension, critical in extensions:
        made = made.add_extension(extension, critical=critical)
    return made.sign(signer, hashes.SHA256())


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"certificates can't be written to {folder}: {reason_of(error)}"
        ) from error
