"""Servers and channels between real processes and on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millrace.wire import options
from millrace.wire.channel import open_channel
from millrace.wire.pb import decode_pb2, decode_pb2_grpc
from millrace.wire.server import BindError, add_health, bind, create_server
from support.deadlines import HANG_S

SERVER = """
import asyncio
from millrace.wire.pb import decode_pb2, decode_pb2_grpc
from millrace.wire.server import bind, create_server

class Decode(decode_pb2_grpc.DecodeServicer):
    async def StreamTokens(self, request, context):
        yield decode_pb2.TokenBatch()
        await asyncio.sleep(60)

async def main():
    server = create_server()
    decode_pb2_grpc.add_DecodeServicer_to_server(Decode(), server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()

asyncio.run(main())
"""

CLIENT = """
import asyncio, sys
from millrace.wire import options
from millrace.wire.channel import open_channel
from millrace.wire.pb import decode_pb2, decode_pb2_grpc

async def main():
    call = decode_pb2_grpc.DecodeStub(open_channel(sys.argv[1])).StreamTokens(
        decode_pb2.TokenSubscription()
    )
    async for _ in call:
        print("subscribed", flush=True)

asyncio.run(main())
"""


class Decode(decode_pb2_grpc.DecodeServicer):
    """Answers at once, then keeps the stream open until the client is gone."""

    def __init__(self, batch: decode_pb2.TokenBatch | None = None) -> None:
        self.batch = batch if batch is not None else decode_pb2.TokenBatch()
        self.left = asyncio.Event()

    async def StreamTokens(self, request, context):
        try:
            yield self.batch
            await asyncio.sleep(60)
        finally:
            self.left.set()


@contextlib.asynccontextmanager
async def serving(decode: Decode, **limits: int) -> AsyncIterator[str]:
    server = create_server(**limits)
    decode_pb2_grpc.add_DecodeServicer_to_server(decode, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def process(
    script: str, *arguments: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Starts a child that runs `script`; returns the child and its first line."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script, *arguments), stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    try:
        yield child, (await child.stdout.readline()).decode().strip()
    finally:
        with contextlib.suppress(ProcessLookupError):  # the test may have ended it
            child.kill()
        await child.wait()


def subscribe(channel: grpc.aio.Channel, **settings: bool) -> grpc.aio.UnaryStreamCall:
    return decode_pb2_grpc.DecodeStub(channel).StreamTokens(
        decode_pb2.TokenSubscription(), **settings
    )


async def test_bind_returns_the_real_port_and_refuses_a_taken_one() -> None:
    first, second = create_server(), create_server()
    port = bind(first, "127.0.0.1", 0)
    assert port > 0
    with pytest.raises(BindError, match=f"can't listen on 127.0.0.1:{port}"):
        bind(second, "127.0.0.1", port)
    await first.stop(None)
    await second.stop(None)


async def test_bind_names_a_host_that_is_not_here() -> None:
    server = create_server()
    with pytest.raises(BindError, match=r"can't listen on 203\.0\.113\.1:7000"):
        bind(server, "203.0.113.1", 7000)
    await server.stop(None)


async def test_bind_takes_ipv6_hosts() -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6 loopback")
    server = create_server()
    port = bind(server, "::1", 0)
    await server.start()
    async with open_channel(f"[::1]:{port}") as channel:
        await asyncio.wait_for(channel.channel_ready(), HANG_S)
    await server.stop(None)


async def test_health_of_the_server_and_of_its_services() -> None:
    server = create_server()
    health = add_health(server, ["millrace.v1.Decode", "millrace.v1.KvReceiver"])
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def status(service: str) -> int:
            return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status

        assert await status("") == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as info:
            await status("millrace.v1.Decode")
        assert info.value.code() == grpc.StatusCode.NOT_FOUND
        for serving_now, wanted in (
            (True, health_pb2.HealthCheckResponse.SERVING),
            (False, health_pb2.HealthCheckResponse.NOT_SERVING),
        ):
            await health.set_serving(serving_now)
            assert await status("millrace.v1.Decode") == wanted
            assert await status("millrace.v1.KvReceiver") == wanted
        assert await status("") == health_pb2.HealthCheckResponse.SERVING
    await server.stop(None)


async def test_messages_are_bounded_on_both_sides() -> None:
    large = decode_pb2.TokenBatch(
        events=[decode_pb2.TokenEvent(request_id="x" * 10_000, error="x" * 10_000)]
    )
    for server_limit, client_limit, fits in (
        (64_000, 64_000, True),
        (10_000, 64_000, False),
        (64_000, 10_000, False),
    ):
        async with (
            serving(Decode(large), max_message_bytes=server_limit) as address,
            open_channel(address, max_message_bytes=client_limit) as channel,
        ):
            call = subscribe(channel)
            if fits:
                assert await call.read() == large
                continue
            with pytest.raises(grpc.aio.AioRpcError) as info:
                await call.read()
            assert info.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_killed_server_is_noticed_at_once() -> None:
    async with process(SERVER) as (child, port), open_channel(f"127.0.0.1:{port}") as channel:
        call = subscribe(channel)
        await call.read()
        child.kill()
        async with asyncio.timeout(HANG_S):
            with pytest.raises(grpc.aio.AioRpcError) as info:
                await call.read()
        assert info.value.code() == grpc.StatusCode.UNAVAILABLE


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets keepalive to half seconds for the pings of this process."""
    assert options.KEEPALIVE_INTERVAL_S + options.KEEPALIVE_TIMEOUT_S <= 6
    monkeypatch.setattr(options, "KEEPALIVE_INTERVAL_S", 0.5)
    monkeypatch.setattr(options, "KEEPALIVE_TIMEOUT_S", 0.5)


@pytest.mark.usefixtures("hasty")
async def test_a_stopped_server_is_noticed_in_seconds() -> None:
    async with process(SERVER) as (child, port), open_channel(f"127.0.0.1:{port}") as channel:
        call = subscribe(channel)
        await call.read()
        child.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(HANG_S):
            with pytest.raises(grpc.aio.AioRpcError) as info:
                await call.read()
        assert info.value.code() == grpc.StatusCode.UNAVAILABLE


@pytest.mark.usefixtures("hasty")
async def test_a_stopped_client_is_noticed_in_seconds() -> None:
    decode = Decode()
    async with serving(decode) as address, process(CLIENT, address) as (child, line):
        assert line == "subscribed"
        assert not decode.left.is_set()
        os.kill(child.pid, signal.SIGSTOP)
        async with asyncio.timeout(HANG_S):
            await decode.left.wait()


@pytest.mark.usefixtures("hasty")
async def test_pings_of_a_silent_stream_are_welcome() -> None:
    """A strict server sends GOAWAY (too_many_pings) after the third ping: not READY any more."""
    async with serving(Decode()) as address, open_channel(address) as channel:
        call = subscribe(channel)
        await call.read()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call.read(), 3)  # six intervals
        assert channel.get_state() is grpc.ChannelConnectivity.READY


async def test_a_server_that_comes_back_is_found_again_soon() -> None:
    server = create_server()
    decode_pb2_grpc.add_DecodeServicer_to_server(Decode(), server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        await subscribe(channel).read()
        await server.stop(None)
        with pytest.raises(grpc.aio.AioRpcError):
            await subscribe(channel).read()
        await asyncio.sleep(1)  # attempts fail and back off meanwhile
        server = create_server()
        decode_pb2_grpc.add_DecodeServicer_to_server(Decode(), server)
        assert bind(server, "127.0.0.1", port) == port
        await server.start()
        async with asyncio.timeout(HANG_S):
            await subscribe(channel, wait_for_ready=True).read()
    await server.stop(None)


async def test_proxies_of_the_environment_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    async with serving(Decode()) as address, open_channel(address) as channel:
        await asyncio.wait_for(channel.channel_ready(), HANG_S)
