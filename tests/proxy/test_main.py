"""The service as a whole: start, workers behind one port, drain on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from contextlib import asynccontextmanager

import httpx
import psutil
import pytest
from tokenizers import Tokenizer

from millrace.bench.gateway.stub_model import write_stub_model
from millrace.core.config import load_config
from millrace.core.config.models import ModelConfig
from millrace.core.errors import MillraceError, ModelError
from millrace.event_lines import event_lines
from millrace.proxy.main import serve
from millrace.proxy.service import listen
from support.deadlines import HANG_S
from support.gateway import MODEL, Fleet, Script
from support.live_stack import eventually
from support.metrics import total

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


def nowhere(folder) -> ModelConfig:
    return ModelConfig(model=str(folder / "nowhere"), scheduler="127.0.0.1:1")


@asynccontextmanager
async def service(folder, *settings):
    """Yields the fleet, a client and the task of `serve`; then stops them."""
    write_stub_model(folder)
    fleet = Fleet(Tokenizer.from_file(str(folder / "tokenizer.json")))
    await fleet.start()
    port = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        serve(
            load_config(overrides=["proxy.port=0", *settings]),
            ModelConfig(name=MODEL, model=str(folder), scheduler=fleet.scheduler_address),
            on_ready=port.set_result,
        )
    )
    await asyncio.wait({task, port}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await fleet.stop()
        task.result()
    url = f"http://127.0.0.1:{port.result()}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=HANG_S, trust_env=False) as http:
            for _ in range(round(HANG_S / 0.02)):
                if (await http.get("/ready")).status_code == 200:
                    break
                await asyncio.sleep(0.02)
            yield fleet, http, task
    finally:
        if not task.done():
            os.kill(os.getpid(), signal.SIGTERM)
        await task
        await fleet.stop()


async def test_drains_on_sigterm(tmp_path):
    async with service(tmp_path) as (fleet, http, task):
        fleet.script = Script(hold=asyncio.Event())
        async with http.stream("POST", CHAT, json={**BODY, "stream": True}) as response:
            lines = event_lines(response)
            await anext(lines)
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(httpx.ConnectError):
                for _ in range(round(HANG_S / 0.01)):
                    async with httpx.AsyncClient(timeout=HANG_S, trust_env=False) as other:
                        # Closed while it was accepted, or before its request was read.
                        with contextlib.suppress(httpx.ReadError, httpx.RemoteProtocolError):
                            await other.get(f"{http.base_url}/health")
                    await asyncio.sleep(0.01)
            assert not task.done()
            fleet.script.hold.set()
            rest = [line async for line in lines]
        assert rest[-2] == "data: [DONE]"
        await asyncio.wait_for(task, HANG_S)
        assert not fleet.cancels


async def test_drain_has_an_end(tmp_path):
    async with service(tmp_path, "proxy.drain_timeout_s=0.2") as (fleet, http, task):
        fleet.script = Script(hold=asyncio.Event())
        async with http.stream("POST", CHAT, json={**BODY, "stream": True}) as response:
            lines = event_lines(response)
            await anext(lines)
            os.kill(os.getpid(), signal.SIGTERM)
            rest = [line async for line in lines]
        assert "shutting down" in rest[-2]
        await asyncio.wait_for(task, HANG_S)
        await eventually(lambda: len(fleet.cancels) == 1)


async def test_workers_share_a_port_their_metrics_and_their_waterfalls(tmp_path):
    async with service(tmp_path, "proxy.workers=2") as (fleet, http, _):
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(
            base_url=http.base_url, limits=limits, trust_env=False, timeout=HANG_S
        ) as fresh:
            answers = []

            async def both_serve() -> bool:
                answer = await fresh.post(CHAT, json=BODY)
                assert answer.status_code in (200, 503)  # 503: one worker is not connected yet
                if answer.status_code == 200:
                    answers.append(answer.json()["id"])
                return len({spec.proxy.id for spec in fleet.specs}) == 2

            await eventually(both_serve)
            text = (await fresh.get("/metrics")).text
            for name in answers[-8:]:  # of both workers, asked of either
                found = await fresh.get(f"/v1/requests/{name}/trace")
                assert found.json()["request_id"] == name
            assert (await fresh.get("/v1/requests/nothing/trace")).status_code == 404
        counted = {"code": "200", "route": CHAT}
        assert total(text, "millrace_proxy_http_requests_total", **counted) == len(answers)


@pytest.mark.usefixtures("hears_hangup")
async def test_workers_leave_a_terminals_signals_to_their_parent(tmp_path):
    """A terminal sends them to the whole group; the parent drains the workers."""
    async with service(tmp_path, "proxy.workers=2") as (_, http, task):
        workers = [
            child
            for child in psutil.Process().children()
            if "spawn_main" in " ".join(child.cmdline())
        ]
        assert len(workers) == 2
        for worker in workers:
            worker.send_signal(signal.SIGHUP)
            worker.send_signal(signal.SIGINT)
        for _ in range(8):
            async with httpx.AsyncClient(trust_env=False, timeout=HANG_S) as fresh:
                assert (await fresh.get(f"{http.base_url}/health")).status_code == 200
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.wait_for(task, HANG_S)


async def test_a_taken_port_is_named(tmp_path):
    bound = listen("127.0.0.1", 0)
    bound.listen()
    port = bound.getsockname()[1]
    with pytest.raises(MillraceError, match=str(port)):
        async with service(tmp_path, f"proxy.port={port}"):
            pass
    bound.close()


async def test_a_missing_model_is_named(tmp_path):
    with pytest.raises(ModelError, match="nowhere"):
        await serve(load_config(), nowhere(tmp_path))


async def test_workers_say_why_they_can_t_start(tmp_path):
    config = load_config(overrides=["proxy.workers=2", "proxy.port=0"])
    with pytest.raises(MillraceError, match="nowhere"):
        await serve(config, nowhere(tmp_path))
