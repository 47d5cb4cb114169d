"""TLS of the chart: on by default, with certificates that Helm makes once and upgrades keep."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ssl
from datetime import timedelta
from pathlib import Path

import pytest
import yaml
from cryptography import x509

from millrace.core.config import TlsConfig
from millrace.wire.tls import SERVER_NAME, Tls
from support.chart import Object, find, objects, values_of
from support.helm_cluster import upgraded

MINIMAL = values_of("minimal")
FILES = {"ca_file": "ca.crt", "cert_file": "tls.crt", "key_file": "tls.key"}


def installed(**tls: object) -> list[Object]:
    return objects(MINIMAL | {"tls": tls}, name="mill", namespace="llm")


def written(found: list[Object], folder: Path) -> TlsConfig:
    """The files of the release's certificates."""
    folder.mkdir()
    for name, content in find(found, "Secret", "mill-tls")["data"].items():
        (folder / name).write_bytes(base64.b64decode(content))
    return TlsConfig(**{field: str(folder / name) for field, name in FILES.items()})


def context(purpose: ssl.Purpose, own: TlsConfig, *, shows: bool = True) -> ssl.SSLContext:
    made = ssl.create_default_context(purpose, cafile=own.ca_file)
    made.verify_mode = ssl.CERT_REQUIRED
    if shows:
        made.load_cert_chain(own.cert_file, own.key_file)
    return made


async def answer(server: TlsConfig, client: TlsConfig, name: str, *, shows: bool = True) -> bytes:
    """What a client that checks `name` reads from a server that asks for its certificate.

    `shows`: whether the client has one. Empty: the connection ended. Raises OSError.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(await reader.readexactly(1))
            writer.close()
            await writer.wait_closed()

    inner = context(ssl.Purpose.CLIENT_AUTH, server)
    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=inner) as listening:
        reader, writer = await asyncio.open_connection(
            *listening.sockets[0].getsockname(),
            ssl=context(ssl.Purpose.SERVER_AUTH, client, shows=shows),
            server_hostname=name,
        )
        writer.write(b"x")
        try:
            return await reader.read()
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def test_services_with_the_certificates_that_helm_makes_take_each_other_alone(
    tmp_path: Path,
) -> None:
    own, other = (written(installed(), tmp_path / name) for name in ("own", "other"))
    Tls(own)  # as the services check them
    for name in (SERVER_NAME, "mill-redis.llm.svc"):
        assert await answer(own, own, name) == b"x"
    with pytest.raises(ssl.SSLCertVerificationError):
        await answer(own, own, "proxy.example.com")
    with pytest.raises(ssl.SSLCertVerificationError):  # of another installation
        await answer(other, own, SERVER_NAME)
    refused = b""
    with contextlib.suppress(OSError):
        refused = await answer(own, own, SERVER_NAME, shows=False)
    assert not refused


def test_an_upgrade_keeps_the_certificates() -> None:
    kept = {name: f"{name} of the install".encode() for name in FILES.values()}
    files = upgraded(MINIMAL, {"millrace-tls": kept})
    made = yaml.safe_load(files["certificates.yaml"])
    assert {name: base64.b64decode(one) for name, one in made["data"].items()} == kept


def test_certificates_live_as_long_as_asked(tmp_path: Path) -> None:
    own = written(installed(selfSigned={"days": 30}), tmp_path / "own")
    for file in (own.ca_file, own.cert_file):
        shown = x509.load_pem_x509_certificate(Path(file).read_bytes())
        assert shown.not_valid_after_utc - shown.not_valid_before_utc == timedelta(days=30)


def test_without_tls_nothing_names_certificates() -> None:
    found = installed(enabled=False)
    assert "tls" not in find(found, "ModelService", "mill")["spec"]
    assert find(found, "Secret", "mill-redis")["stringData"]["url"].startswith("redis://")
    text = yaml.safe_dump_all(found)
    assert "mill-tls" not in text and "TLS" not in text.replace("TLS from", "")


@pytest.mark.parametrize("tls", [{"existingSecret": "own"}, {"certManager": {"enabled": True}}, {}])
def test_every_part_uses_the_same_secret(tls: Object) -> None:
    found = installed(**tls)
    name = tls.get("existingSecret", "mill-tls")
    assert find(found, "ModelService", "mill")["spec"]["tls"] == {"secretName": name}
    (operator,) = [one for one in found if one["kind"] == "Deployment"]
    (container,) = operator["spec"]["template"]["spec"]["containers"]
    given = {one["name"]: one.get("value") for one in container["env"]}
    assert given["MILLRACE_TLS_SECRET"] == name  # of ModelServices that name none
    made_by_helm = not tls
    secrets = {one["metadata"]["name"] for one in found if one["kind"] == "Secret"}
    assert ("mill-tls" in secrets) == made_by_helm
