"""Mutual TLS on real sockets: accepted and refused clients, and renewed certificates."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millrace.core.config import TlsConfig
from millrace.core.errors import ConfigError
from millrace.wire.channel import Channels, open_channel
from millrace.wire.server import add_health, bind, create_server
from millrace.wire.tls import SERVER_NAME, Tls, use_tls
from support.certificates import Authority, needs_openssl
from support.deadlines import HANG_S

pytestmark = needs_openssl

PLAIN = TlsConfig()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"))


@pytest.fixture
def ours(authority: Authority, tmp_path: Path) -> Iterator[TlsConfig]:
    """Writes the files of this process, which uses TLS until the test ends."""
    config = authority.issue(tmp_path / "ours")
    use_tls(config)
    yield config
    use_tls(PLAIN)


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[str]:
    server = create_server()
    health = add_health(server, ["one"])
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    await health.set_serving(True)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def check(channel: grpc.aio.Channel) -> int:
    """Makes one call; raises AioRpcError if the server refuses the connection."""
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service="one"), timeout=HANG_S)).status


async def is_let_in(address: str) -> bool:
    async with open_channel(address) as channel:
        try:
            return await check(channel) == health_pb2.HealthCheckResponse.SERVING
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            return False


def trusting(ca: TlsConfig, shown: TlsConfig | None) -> grpc.ChannelCredentials:
    """Returns the credentials of a client that trusts a CA and shows a certificate, or none."""
    trusted = Path(ca.ca_file).read_bytes()
    if shown is None:
        return grpc.ssl_channel_credentials(trusted)
    pair = (Path(shown.key_file).read_bytes(), Path(shown.cert_file).read_bytes())
    return grpc.ssl_channel_credentials(trusted, *pair)


async def test_both_ends_with_certificates_of_one_ca_understand_each_other(ours) -> None:
    async with serving() as address:
        assert await is_let_in(address)


async def test_whoever_has_no_certificate_of_the_ca_is_refused(ours, stranger, tmp_path) -> None:
    named = [("grpc.ssl_target_name_override", SERVER_NAME)]
    foreign = stranger.issue(tmp_path / "foreign")
    async with serving() as address:
        for shown in (None, foreign):  # both trust us
            credentials = trusting(ours, shown)
            async with grpc.aio.secure_channel(address, credentials, options=named) as channel:
                with pytest.raises(grpc.aio.AioRpcError):
                    await check(channel)
        use_tls(PLAIN)
        assert not await is_let_in(address)


async def test_a_server_of_another_ca_or_without_tls_is_not_spoken_to(
    ours, stranger, tmp_path
) -> None:
    use_tls(stranger.issue(tmp_path / "other"))
    async with serving() as address:
        use_tls(ours)
        assert not await is_let_in(address)
    use_tls(PLAIN)
    async with serving() as address:
        use_tls(ours)
        assert not await is_let_in(address)


async def test_renewed_files_are_taken_without_a_restart(ours, stranger, caplog) -> None:
    """Also from another CA: new connections show and require the new certificates."""
    channels = Channels()
    async with serving() as address:
        before = channels.to(address)
        assert await check(before) and channels.to(address) is before
        with caplog.at_level(logging.INFO):
            stranger.issue(Path(ours.ca_file).parent)
            after = channels.to(address)
        assert "renewed certificates are in use" in caplog.text
        assert after is not before
        assert await check(before)  # who is connected stays
        assert await check(after) and await is_let_in(address)
        await channels.close()


async def test_however_often_certificates_are_renewed_few_channels_stay_open(
    ours, authority
) -> None:
    channels = Channels()
    async with serving() as address:
        opened = []
        for _ in range(4):
            opened.append(channels.to(address))
            await check(opened[-1])
            authority.issue(Path(ours.ca_file).parent)
        channels.to(address)
        await asyncio.sleep(0)  # those that are closed are closed in a task of their own
        assert await check(opened[-1])  # calls may be under way
        for channel in opened[:-1]:
            with pytest.raises(grpc.aio.UsageError):
                await check(channel)
        await channels.close()


def test_a_file_that_goes_while_it_is_read_is_waited_for(ours, monkeypatch, caplog) -> None:
    """The key is removed between the read of its bytes and the check, which opens it again."""
    read, key = Path.read_bytes, Path(ours.key_file)
    kept = key.read_bytes()

    def read_and_remove(path: Path) -> bytes:
        content = read(path)
        if path == key:
            key.unlink()
        return content

    tls = Tls(ours)
    good = tls.channel_credentials()
    key.write_bytes(kept + b"\n")
    monkeypatch.setattr(Path, "read_bytes", read_and_remove)
    assert tls.channel_credentials() is good
    assert "the last good certificates stay in use" in caplog.text
    monkeypatch.undo()
    key.write_bytes(kept)
    assert tls.channel_credentials() is not good


async def test_half_renewed_files_wait_for_the_other_half(
    ours, authority, tmp_path, caplog
) -> None:
    renewed = authority.issue(tmp_path / "renewed")
    async with serving() as address:
        shutil.copyfile(renewed.key_file, ours.key_file)
        assert await is_let_in(address)
        assert caplog.text.count("the last good certificates stay in use: tls.key_file is") == 1
        shutil.copyfile(renewed.cert_file, ours.cert_file)
        with caplog.at_level(logging.INFO):
            assert await is_let_in(address)
        assert "renewed certificates are in use" in caplog.text


def spoilt(name: str, content: str | None) -> Callable[[TlsConfig, Path], TlsConfig]:
    """Returns a change of one file: a missing file, or other content."""

    def change(config: TlsConfig, folder: Path) -> TlsConfig:
        path = folder / "spoilt.pem"
        if content is not None:
            path.write_text(content)
        return replace(config, **{name: str(path)})

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (spoilt("ca_file", None), r"tls\.ca_file is '.*spoilt\.pem': No such file"),
        (spoilt("key_file", None), r"tls\.key_file is '.*spoilt\.pem': No such file"),
        (spoilt("ca_file", "?"), r"tls\.ca_file is .*: it holds no certificate in PEM"),
        (spoilt("cert_file", "?"), r"tls\.cert_file is .*: with tls\.key_file .* no certificate"),
    ],
)
def test_files_that_are_missing_or_no_certificates_are_named(
    authority, tmp_path, change, message
) -> None:
    good = authority.issue(tmp_path / "good")
    with pytest.raises(ConfigError, match=message):
        Tls(change(good, tmp_path))


def test_files_that_do_not_fit_each_other_are_named(authority, stranger, tmp_path) -> None:
    good, other = (a.issue(tmp_path / a.folder.name) for a in (authority, stranger))
    with pytest.raises(ConfigError, match=r"tls\.key_file is .* is not the key of tls\.cert_file"):
        Tls(replace(good, key_file=other.key_file))
    with pytest.raises(ConfigError, match=r"tls\.cert_file is .*: peers would refuse it: .*issuer"):
        Tls(replace(good, ca_file=other.ca_file))
    elsewhere = authority.issue(tmp_path / "elsewhere", name="proxy.example")
    with pytest.raises(ConfigError, match=r"peers would refuse it: .*not valid for 'millrace"):
        Tls(elsewhere)
