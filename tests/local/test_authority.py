"""The certificates of `millrace up --tls`."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from millrace.core.config import load_config
from millrace.core.errors import ConfigError
from millrace.local.authority import as_settings, as_toml, issue_certificates
from millrace.wire.tls import SERVER_NAME, Tls


def certificate(path: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(Path(path).read_bytes())


def test_services_accept_each_other_and_nobody_of_another_stack(tmp_path: Path) -> None:
    """Tls shakes hands with itself by the files: both ends check both certificates."""
    here, there = (issue_certificates(tmp_path / name) for name in ("here", "there"))
    Tls(here)
    stranger = replace(here, cert_file=there.cert_file, key_file=there.key_file)
    with pytest.raises(ConfigError, match=r"tls\.cert_file.*peers would refuse it"):
        Tls(stranger)


def test_the_key_is_the_users_alone_and_the_authoritys_is_gone(tmp_path: Path) -> None:
    config = issue_certificates(tmp_path / "tls")
    assert stat.S_IMODE(Path(config.key_file).stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "tls").stat().st_mode) == 0o700
    assert sorted(one.name for one in (tmp_path / "tls").iterdir()) == [
        *("ca.crt", "tls.crt", "tls.key")
    ]
    root, service = certificate(config.ca_file), certificate(config.cert_file)
    service.verify_directly_issued_by(root)
    keys = [one.public_key() for one in (root, service)]
    assert all(isinstance(key, ec.EllipticCurvePublicKey) for key in keys)
    assert keys[0] != keys[1]
    names = service.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [SERVER_NAME]


def test_both_forms_of_settings_name_the_files(tmp_path: Path) -> None:
    config = issue_certificates(tmp_path / "tls")
    file = tmp_path / "tls.toml"
    file.write_text(as_toml(config))
    assert load_config(None, as_settings(config)).tls == load_config(file, []).tls == config


def test_a_folder_that_cant_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"can't be written to .*file/tls"):
        issue_certificates(tmp_path / "file" / "tls")
