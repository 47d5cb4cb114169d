"""The load generator against a small local server with known timings and known faults."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from operator import itemgetter

import pytest

from millrace.bench.common.load_test import ServeOptions, run
from millrace.bench.common.report import summarise
from millrace.bench.common.sse_client import SseClient
from millrace.core.errors import ConfigError
from millrace.sim.workload.traces import TraceRow
from millrace.sim.workload.workload import SloClass, WorkloadOptions, parse_lengths
from support.deadlines import HANG_S
from support.sse_server import SseServer, running

SLO = SloClass(name="chat", ttft_s=0.5, tbt_s=0.1)


def workload(**settings):
    return WorkloadOptions(
        **{
            "input_tokens": parse_lengths("12:20", "-"),
            "output_tokens": parse_lengths("5", "-"),
            "classes": [SLO],
            "requests": 6,
            "open_arrivals": "rate_rps" not in settings and "trace" not in settings,
            **settings,
        }
    )


async def measure(server, concurrency=2, timeout_s=HANG_S, warmup=0, **settings):
    options = ServeOptions(
        url=server.url,
        workload=workload(**settings),
        concurrency=concurrency,
        timeout_s=timeout_s,
        warmup=warmup,
    )
    return await run(options)


async def test_known_timings_are_found():
    async with running(SseServer(ttft_s=0.08, tbt_s=0.03)) as server:
        began_s = time.monotonic()
        records = await measure(server)
        took_s = time.monotonic() - began_s
    report = summarise(records, [SLO])
    assert report.succeeded == 6
    assert not report.short_outputs
    # No first and no last token is early; how late they are depends on the machine's load, and a
    # first one that is late shortens what follows. Three after another on a connection.
    assert all(record.ttft_s >= 0.075 for record in records)
    assert all(record.ttft_s + 4 * record.mean_tbt_s >= 0.075 + 4 * 0.028 for record in records)
    assert sum(record.ttft_s + 4 * record.mean_tbt_s for record in records) <= 2 * took_s
    assert all(len(record.token_times_s) == 5 for record in records)
    assert report.total.e2e_ms.p50 >= 195
    assert server.most_at_once == 2


async def test_requests_are_exact_and_seeded():
    async with running(SseServer(0.0, 0.0)) as server:
        records = await measure(server, warmup=1)
        again = SseServer(0.0, 0.0)
        async with running(again):
            await measure(again)
    assert len(records) == 6
    warm_up, *sent = server.requests
    assert warm_up["max_tokens"] == 4
    key = itemgetter("seed")
    assert sorted(sent, key=key) == sorted(again.requests, key=key)
    for body in sent:
        assert body["model"] == "the-model"
        assert 12 <= len(body["prompt"]) <= 20
        assert set(body["prompt"]) <= {5, 6, 7, 11}
        assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"]) == (5, 5, True)
    assert {h["x-millrace-ttft-slo-ms"] for h in server.headers[1:]} == {"500"}
    assert {h["x-millrace-tbt-slo-ms"] for h in server.headers[1:]} == {"100"}
    assert "x-millrace-ttft-slo-ms" not in server.headers[0]
    assert server.connections <= 3


async def test_open_arrivals_do_not_wait_for_answers():
    rows = [TraceRow(arrival_s=0.02 * i, input_tokens=3, output_tokens=2) for i in range(8)]
    async with running(SseServer(0.0, 0.0)) as server:
        all_here = asyncio.Event()

        async def when_all_are_here(exchange):
            if server.at_once == 6:
                all_here.set()
            await all_here.wait()
            await server.stream(exchange)

        server.answer = when_all_are_here
        records = await measure(server, concurrency=None, trace=rows, input_tokens=None)
    assert not any(record.error for record in records)
    for record in records:
        assert record.due_s - 0.001 <= record.sent_s
    assert [record.input_tokens for record in records] == [3] * 6


async def test_a_duration_ends_a_closed_loop():
    async with running(SseServer(0.02, 0.0)) as server:
        records = await measure(server, requests=None, duration_s=0.3)
    assert 1 <= len(records) <= 40


def refuse(status):
    return lambda exchange: exchange.send_json({"error": {"message": "no room"}}, status)


def fail_midway(exchange):
    exchange.start_events()
    exchange.chunk(b'data: {"choices": [{"text": "a"}]}\n\n')
    exchange.chunk(b'data: {"error": {"message": "lost"}}\n\ndata: [DONE]\n\n')
    exchange.end_events()


def hang_up(exchange):
    exchange.start_events()
    exchange.chunk(b'data: {"choices": [{"text": "a"}]}\n\n')
    exchange.writer.close()


def no_done(exchange):
    exchange.start_events()
    exchange.chunk(b'data: {"choices": [{"text": "a"}]}\n\n')
    exchange.end_events()


def no_tokens(exchange):
    exchange.start_events()
    exchange.chunk(b"data: [DONE]\n\n")
    exchange.end_events()


def nonsense(exchange):
    exchange.start_events()
    exchange.chunk(b"data: {not json\n\n")
    exchange.end_events()


def not_http(exchange):
    exchange.send(b"HELLO\r\n\r\n")


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (refuse(429), "http 429"),
        (refuse(500), "http 500"),
        (fail_midway, "stream error"),
        (hang_up, "connection"),
        (no_done, "incomplete"),
        (no_tokens, "incomplete"),
        (nonsense, "malformed event"),
        (not_http, "connection"),
    ],
)
async def test_faults_are_told_apart(answer, kind):
    async with running(SseServer(answer=answer)) as server:
        records = await measure(server, requests=3)
    assert [record.error for record in records] == [kind] * 3
    assert all(record.detail for record in records)
    assert summarise(records, [SLO]).total.attainment == 0.0


async def test_a_silent_server_times_out():
    async with running(SseServer(ttft_s=30.0)) as server:
        records = await measure(server, timeout_s=0.15, requests=2)
        assert [record.error for record in records] == ["timeout"] * 2


async def test_stopping_early_reports_what_ended():
    stop = asyncio.Event()
    async with running(SseServer(0.01, 0.0)) as server:

        async def then_hang(exchange):
            if len(server.requests) > 4:
                stop.set()
                await asyncio.Event().wait()
            await server.stream(exchange)

        server.answer = then_hang
        options = ServeOptions(url=server.url, workload=workload(), concurrency=1, warmup=0)
        records = await run(options, stop=stop)
    assert len(records) == 4
    assert not any(record.error for record in records)


# -- the client


async def test_events_split_anywhere_are_put_together():
    whole = b": comment\r\ndata: one\r\n\r\ndata:two\ndata: more\n\nevent: x\nid: 1\n\ndata: \n\n"

    async def drip(exchange):
        exchange.start_events()
        for at in range(len(whole)):
            exchange.chunk(whole[at : at + 1])
            await asyncio.sleep(0)
        exchange.end_events()

    async with running(SseServer(answer=drip)) as server:
        client = SseClient(server.url + "/base/")
        response = await client.post("/x", b"{}")
        client.close()
    assert [data for _, data in response.events] == [b"one", b"two\nmore", b""]
    times = [at_s for at_s, _ in response.events]
    assert response.sent_s < times[0] <= times[-1] <= response.ended_s


async def test_connections_are_used_again_and_stale_ones_replaced():
    async with running(SseServer(0.0, 0.0)) as server:
        client = SseClient(server.url)
        body = json.dumps({"max_tokens": 2}).encode()
        for _ in range(3):
            assert len((await client.post("/v1/completions", body)).events) == 4
        assert server.connections == 1

        def close_after(exchange):
            exchange.send_json({})
            exchange.writer.close()

        server.answer = close_after
        for _ in range(3):
            assert (await client.post("/v1/completions", body)).json() == {}
        client.close()
    assert 2 <= server.connections <= 4


async def test_a_body_that_ends_with_the_connection():
    def plain(exchange):
        exchange.send(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nuntil the end")
        exchange.writer.close()

    async with running(SseServer(answer=plain)) as server:
        client = SseClient(server.url)
        response = await client.post("/x", b"{}")
        client.close()
    assert response.body == b"until the end"


@pytest.mark.parametrize("url", ["", "127.0.0.1:80", "ftp://x", "http://"])
def test_bad_urls(url):
    with pytest.raises(ConfigError, match="--url"):
        SseClient(url)


async def test_a_server_that_is_not_there_is_a_clear_error():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(ConfigError, match="did not answer"):
            await run(ServeOptions(url=url, workload=workload(), concurrency=1))


async def test_without_tokenize_the_error_says_what_to_do():
    async def models_only(exchange):
        status = 200 if exchange.path == "/v1/models" else 404
        exchange.send_json({"data": [{"id": "m"}]}, status)

    async with running(SseServer(0.0, 0.0)) as server:
        server.serve = models_only
        options = ServeOptions(url=server.url, workload=workload(), concurrency=1)
        with pytest.raises(ConfigError, match="--token-ids"):
            await run(options)
