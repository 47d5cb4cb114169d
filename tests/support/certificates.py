"""Certificates for tests, made by the `openssl` command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from millrace.core.config import TlsConfig
from millrace.wire.tls import SERVER_NAME

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="certificates for tests need the openssl command"
)

_EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Authority:
    """A CA of its own, which keeps its files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._openssl("req", "-x509", *_EC, "-keyout", "ca.key", "-out", "ca.crt", "-days", "1",
                      "-subj", f"/CN={folder.name}")  # fmt: skip

    def issue(self, folder: Path, *, name: str = SERVER_NAME, days: int = 1) -> TlsConfig:
        """Writes ca.crt, tls.crt and tls.key, valid for `name`, into `folder`; replaces old
        files.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._openssl("req", *_EC, "-keyout", "tls.key", "-out", "tls.csr", "-subj", "/CN=millrace")
        (self.folder / "names").write_text(f"subjectAltName=DNS:{name}\n")
        self._openssl("x509", "-req", "-in", "tls.csr", "-CA", "ca.crt", "-CAkey", "ca.key",
                      "-CAcreateserial", "-days", str(days), "-extfile", "names",
                      "-out", "tls.crt")  # fmt: skip
        for file in ("ca.crt", "tls.crt", "tls.key"):
            fresh = folder / f"{file}.new"
            shutil.copyfile(self.folder / file, fresh)
            fresh.rename(folder / file)
        return tls_config(folder)

    def _openssl(self, *arguments: str) -> None:
        done = subprocess.run(
            ["openssl", *arguments], cwd=self.folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def tls_config(folder: Path) -> TlsConfig:
    return TlsConfig(
        ca_file=str(folder / "ca.crt"),
        cert_file=str(folder / "tls.crt"),
        key_file=str(folder / "tls.key"),
    )


def tls_settings(config: TlsConfig) -> list[str]:
    """Returns the options of `--set`."""
    return [f"tls.{name}={getattr(config, name)}" for name in ("ca_file", "cert_file", "key_file")]
