"""Connections of clients that offer other protocols, send endless heads, or fall silent."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from millrace.proxy import service
from millrace.proxy.http import asgi, connection
from support.deadlines import HANG_S, eventually
from support.gateway import MODEL, Script, gateway

CHAT = "/v1/chat/completions"
BODY = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}).encode()
#: What Java's HTTP client sends with its first request to an address without TLS.
OFFER = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n"


def post(headers: str = "", body: bytes = BODY) -> bytes:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{headers}"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@asynccontextmanager
async def connected(stack):
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.proxy.port)
    try:
        async with asyncio.timeout(HANG_S):
            yield reader, writer
    finally:
        writer.close()


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Returns the status and the body of one answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.partition("content-length: ")[2].split()[0])
    return int(head.split()[1]), await reader.readexactly(length)


def code(body: bytes) -> str:
    return json.loads(body)["error"]["code"]


@pytest.mark.parametrize("piece_bytes", [1 << 16, 1, 7])
async def test_a_client_that_offers_http2_is_answered_with_http1(tmp_path, piece_bytes):
    async with gateway(tmp_path) as stack, connected(stack) as (reader, writer):
        for sent in (post(OFFER), post(OFFER), post()):
            for start in range(0, len(sent), piece_bytes):
                writer.write(sent[start : start + piece_bytes])
                await asyncio.sleep(0)
            status, body = await answer(reader)
            assert (status, json.loads(body)["object"]) == (200, "chat.completion")


async def test_an_offer_with_a_body_in_chunks(tmp_path):
    async with gateway(tmp_path) as stack, connected(stack) as (reader, writer):
        whole = post(OFFER + "transfer-encoding: chunked\r\n", b"").replace(
            b"content-length: 0\r\n", b""
        )
        writer.write(whole + b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY) + post())
        assert (await answer(reader))[0] == 200
        assert (await answer(reader))[0] == 200


async def test_an_offer_of_a_request_without_a_body(tmp_path):
    async with gateway(tmp_path) as stack, connected(stack) as (reader, writer):
        for _ in range(2):
            writer.write(f"GET /v1/models HTTP/1.1\r\nhost: x\r\n{OFFER}\r\n".encode())
            assert (await answer(reader))[0] == 200


async def test_clients_above_the_limit_are_refused_until_others_leave(tmp_path, monkeypatch):
    """A process has a number of open files; the connections behind the proxy need some."""
    monkeypatch.setattr(service, "most_clients", lambda files: 2)
    monkeypatch.setattr(service, "file_limit", lambda: 6)
    async with gateway(tmp_path) as stack, connected(stack) as (first, to_first):
        async with connected(stack) as (second, to_second):
            for reader, writer in ((first, to_first), (second, to_second)):
                writer.write(post())
                assert (await answer(reader))[0] == 200
            async with connected(stack) as (third, _), connected(stack) as (fourth, _):
                head = (await third.readuntil(b"\r\n\r\n")).decode()
                assert head.startswith("HTTP/1.1 429 ") and "retry-after: 1\r\n" in head
                assert code(await third.read()) == "overloaded"
                assert await fourth.read() == b""  # there is no room to tell it
            to_second.write(post())
            assert (await answer(second))[0] == 200

        async def is_served():
            async with connected(stack) as (reader, writer):
                writer.write(post())
                return (await answer(reader))[0] == 200

        await eventually(is_served)


async def test_too_few_files_for_the_requests_are_named(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(service, "file_limit", lambda: 1024)
    async with gateway(tmp_path):
        pass
    assert (
        "proxy.max_inflight is 4096, and 768 clients can be connected: a process may have 1024 "
        "files open here" in caplog.text
    )


async def test_nobody_connects_to_others_through_the_proxy(tmp_path):
    async with gateway(tmp_path) as stack, connected(stack) as (reader, writer):
        writer.write(b"CONNECT example.org:443 HTTP/1.1\r\nhost: example.org:443\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("piece", [b"x-a: " + b"a" * 1000 + b"\r\n", b"a" * 1000])
async def test_a_head_that_never_ends_is_refused(tmp_path, piece):
    async with gateway(tmp_path) as stack, connected(stack) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nx: ")
        for _ in range(connection.MOST_HEAD_BYTES // len(piece) + 2):
            writer.write(piece)
            await asyncio.sleep(0)
        status, body = await answer(reader)
        assert (status, code(body)) == (431, "headers_too_large")
        assert await reader.read() == b""  # the connection ends


async def test_a_head_within_the_limit_is_read_in_pieces(tmp_path):
    async with gateway(tmp_path) as stack, connected(stack) as (reader, writer):
        headers = "x-a: " + "a" * (connection.MOST_HEAD_BYTES - 1000) + "\r\n"
        for _ in range(2):  # the bytes of an earlier head do not count
            sent = post(headers)
            for start in range(0, len(sent), 5000):
                writer.write(sent[start : start + 5000])
                await asyncio.sleep(0)
            assert (await answer(reader))[0] == 200


async def test_a_head_that_stays_incomplete_ends_its_connection(tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_S", 0.05)
    async with gateway(tmp_path) as stack:
        async with connected(stack) as (reader, writer):
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n")
            status, body = await answer(reader)
            assert (status, code(body)) == (408, "timeout")
            assert await reader.read() == b""
        async with connected(stack) as (reader, writer):
            assert await reader.read() == b""  # not a byte was sent


async def test_the_next_head_may_be_incomplete_while_an_answer_runs(tmp_path, monkeypatch):
    hold = asyncio.Event()
    async with gateway(tmp_path) as stack:
        stack.fleet.script = Script(hold=hold)
        async with connected(stack) as (reader, writer):
            sent = post()
            writer.write(sent)
            await stack.begun()
            monkeypatch.setattr(connection, "HEAD_S", 0.02)
            writer.write(sent[:30])
            await asyncio.sleep(0.1)
            monkeypatch.setattr(connection, "HEAD_S", HANG_S)
            hold.set()
            assert (await answer(reader))[0] == 200
            writer.write(sent[30:])
            assert (await answer(reader))[0] == 200


async def test_a_body_that_stays_incomplete_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(asgi, "SILENCE_S", 0.05)
    async with gateway(tmp_path) as stack, connected(stack) as (reader, writer):
        writer.write(post()[:-5])
        status, body = await answer(reader)
        assert (status, code(body)) == (408, "timeout")
        assert await reader.read() == b""


async def test_probes_and_models_answer_head(tmp_path):
    async with gateway(tmp_path) as stack:
        for path in ("/health", "/ready", "/metrics", "/v1/models", f"/v1/models/{MODEL}"):
            found = await stack.http.head(path)
            assert (found.status_code, found.content) == (200, b""), path
        assert (await stack.http.head("/v1/models/other")).status_code == 404
