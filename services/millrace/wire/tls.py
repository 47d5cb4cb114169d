"""Mutual TLS between services: each end shows a certificate that the CA of both has signed.

Every new connection uses the present files: they are read again after a change, because
certificates are renewed under running processes. Open connections stay. While the files are
incomplete (a new key without its certificate), the last good files stay in use.
"""

from __future__ import annotations

import logging
import ssl
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc

from millrace.core.config import TlsConfig
from millrace.core.errors import ConfigError

log = logging.getLogger(__name__)

#: The DNS name in every service's certificate, which clients check. Pods come and go and are
#: reached by addresses that no certificate can name in advance. Every process with a certificate
#: that the CA has signed belongs to the deployment.
SERVER_NAME = "millrace.internal"

#: Identifies the content of a file: modification time, inode, size.
_Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class _Files:
    """The content of the three files at `stamp`."""

    stamp: _Stamp
    server: grpc.ServerCertificateConfiguration
    channel: grpc.ChannelCredentials


class Tls:
    """Makes the credentials of both ends from files. Thread-safe."""

    def __init__(self, config: TlsConfig) -> None:
        """Reads the files. Raises ConfigError naming a missing, unreadable or unfit file."""
        self._config = config
        self._lock = threading.Lock()
        self._files = _read(config)
        self._trouble = ""  # the error of the latest files; empty: they are in use

    def server_credentials(self) -> grpc.ServerCredentials:
        """Returns a server's credentials, which use the present files at every connection."""
        return grpc.dynamic_ssl_server_credentials(
            self._current().server,
            lambda: self._current().server,
            require_client_authentication=True,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Returns a new channel's credentials; the same object until the files change."""
        return self._current().channel

    def _current(self) -> _Files:
        with self._lock:
            try:
                if _stamp(self._config) != self._files.stamp:
                    self._files = _read(self._config)
                    log.info("renewed certificates are in use")
                self._trouble = ""
            except ConfigError as error:
                if str(error) != self._trouble:
                    self._trouble = str(error)
                    log.warning("the last good certificates stay in use: %s", error)
            return self._files


_of_process: Tls | None = None


def use_tls(config: TlsConfig) -> None:
    """Sets the TLS of all servers and channels that this process opens from now on.

    Without files in `config` they use no TLS. Raises ConfigError for unusable files.
    """
    global _of_process
    _of_process = Tls(config) if config.enabled else None


def process_tls() -> Tls | None:
    """Returns the TLS set by `use_tls`; None if connections are not encrypted."""
    return _of_process


def _paths(config: TlsConfig) -> dict[str, str]:
    return {"ca_file": config.ca_file, "cert_file": config.cert_file, "key_file": config.key_file}


def _stamp(config: TlsConfig) -> _Stamp:
    stamps = []
    for name, path in _paths(config).items():
        try:
            found = Path(path).stat()
        except OSError as error:
            raise _unfit(name, path, error.strerror) from error
        stamps.append((found.st_mtime_ns, found.st_ino, found.st_size))
    return tuple(stamps)


def _read(config: TlsConfig) -> _Files:
    stamp = _stamp(config)
    held: dict[str, bytes] = {}
    for name, path in _paths(config).items():
        try:
            held[name] = Path(path).read_bytes()
        except OSError as error:
            raise _unfit(name, path, error.strerror) from error
    _check(config)
    if _stamp(config) != stamp:
        raise ConfigError("tls: the files changed while they were read")
    pair = (held["key_file"], held["cert_file"])
    return _Files(
        stamp=stamp,
        server=grpc.ssl_server_certificate_configuration([pair], held["ca_file"]),
        channel=grpc.ssl_channel_credentials(held["ca_file"], *pair),
    )


def _check(config: TlsConfig) -> None:
    """Raises ConfigError if a peer with the same files would refuse this process."""
    client, server = (
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
    )
    server.verify_mode = ssl.CERT_REQUIRED
    for context in (client, server):
        try:
            context.load_verify_locations(config.ca_file)
        except OSError as error:  # an SSLError, or the file has disappeared
            raise _unfit("ca_file", config.ca_file, "it holds no certificate in PEM") from error
        try:
            context.load_cert_chain(config.cert_file, config.key_file, password=b"")
        except OSError as error:
            if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
                why = f"it is not the key of tls.cert_file {config.cert_file!r}"
                raise _unfit("key_file", config.key_file, why) from error
            why = f"with tls.key_file {config.key_file!r} it is no certificate and key in PEM"
            raise _unfit("cert_file", config.cert_file, why) from error
    try:
        _shake_hands(client, server)
    except ssl.SSLCertVerificationError as error:
        why = f"peers would refuse it: {error.verify_message}"
        raise _unfit("cert_file", config.cert_file, why) from error
    except ssl.SSLError as error:
        raise _unfit("cert_file", config.cert_file, f"it can't serve: {error.reason}") from error


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """Runs a handshake within this process. Raises ssl.SSLError if an end refuses."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=SERVER_NAME),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    while ends:
        for end in tuple(ends):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
                ends.remove(end)


def _unfit(name: str, path: str, why: str | None) -> ConfigError:
    return ConfigError(f"tls.{name} is {path!r}: {why}")
