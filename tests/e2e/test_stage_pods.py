"""The pods of an instance whose stages have pods of their own, as processes with the command lines
and the settings that the operator gives them. Addresses are replaced, and files lie elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from millrace.local import stack as stacks
from millrace.local.options import StackOptions
from millrace.local.processes.service import Service, StartupError
from millrace.local.stack import Stack
from millrace_operator.manifests import config_file, instances
from millrace_operator.manifests.pods import Context
from millrace_operator.spec import parse_pool, parse_service
from support.custom_resources import DEFAULTS, model_service, pool
from support.deadlines import HANG_S
from support.live_stack import POOL_BYTES, eventually, greedy_ids, print_logs, store_url
from support.served_model import served_folder
from support.tiny_models import oracle, prompt

MODEL = "llama"
SETTINGS = {
    "engine.device": "cpu",
    "engine.dtype": "float32",
    "engine.kv_bytes": str(POOL_BYTES),
    "engine.max_chunk_tokens": "64",
    "engine.threads": "1",
    "scheduler.heartbeat_s": "0.2",
    "scheduler.lease_s": "10",
    "store.finished_ttl_s": "0",
}
#: Pods have addresses of their own, with the same ports. No other process listens at these.
FIRST, LATER = "decode-0-0", "decode-0-0-1"
OWN = f"{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
ADDRESSES = {FIRST: f"127.78.{OWN}", LATER: f"127.79.{OWN}"}


def group(stack: Stack) -> tuple[instances.Group, dict[str, str]]:
    """Returns the group of a pool named `decode`, and what its texts are replaced by."""
    service = model_service(
        model={"name": "tiny", "uri": str(served_folder(MODEL))},
        prefill=None,
        decode={"role": "mixed"},
        settings=SETTINGS,
        tls={"secretName": "certificates"},
    )
    context = Context.of(parse_service(service), DEFAULTS)
    own = {"role": "mixed", "gpus": 0, "stages": 2, "stagePods": "Own"}
    found = instances.Groups.of(parse_pool(pool("DecodePool", "decode", **own)), context).group(0)
    mounted = config_file.FOLDER
    files = {
        f"{mounted}/tls/ca.crt": stack.tls.ca_file,
        f"{mounted}/tls/tls.crt": stack.tls.cert_file,
        f"{mounted}/tls/tls.key": stack.tls.key_file,
    }
    text = config_file.text(context.tables)
    for path, file in files.items():
        assert path in text
        text = text.replace(path, str(file))
    config = stack.directory / "config.toml"
    config.write_text(text)
    return found, {
        f"{mounted}/config.toml": str(config),
        "chat-scheduler:7070": stack.scheduler_address,
        f"{LATER}.decode.llm.svc": ADDRESSES[LATER],
        "$(NODE_NAME)": "here",
    }


def process_of(stack: Stack, pod: str, template: Any, texts: dict[str, str]) -> Service:
    (container,) = template["spec"]["containers"]
    args = list(container["args"])
    texts = {**texts, "$(POD_NAME)": pod, "$(POD_IP)": ADDRESSES[pod]}
    for text, meant in texts.items():
        args = [arg.replace(text, meant) for arg in args]
    assert not [arg for arg in args if "$(" in arg or ".svc" in arg or "/etc/" in arg]
    if any("STORE" in one["name"] for one in container["env"]):
        args += ["--set", f"store.url={store_url(stack)}"]
    return stack.service(pod, args)


async def probe(pod: str, template: Any, name: str) -> int:
    """Returns the answer's status, as the kubelet gets it; 0 without an answer."""
    (container,) = template["spec"]["containers"]
    get = container[name]["httpGet"]
    (port,) = [p["containerPort"] for p in container["ports"] if p["name"] == get["port"]]
    async with httpx.AsyncClient() as client:
        try:
            answer = await client.get(f"http://{ADDRESSES[pod]}:{port}{get['path']}")
        except httpx.TransportError:
            return 0
    return answer.status_code


@asynccontextmanager
async def restarted(*services: Service) -> AsyncIterator[None]:
    """Starts a process that has ended again, as the kubelet does."""

    async def keep(service: Service) -> None:
        while True:
            assert service.process is not None
            await service.process.wait()
            service.restarts += 1
            with contextlib.suppress(StartupError):
                await service.start(2 * HANG_S)

    keepers = [asyncio.create_task(keep(service)) for service in services]
    try:
        yield
    finally:
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)


@pytest.fixture
def no_fleet_at_the_start(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(stacks, "READY_S", 0.0)
    yield


@pytest.mark.usefixtures("no_fleet_at_the_start")
async def test_a_groups_pods_find_one_another_serve_and_do_so_again_after_a_death() -> None:
    given = StackOptions(
        model=str(served_folder(MODEL)),
        model_name="tiny",
        prefill=0,
        decode=0,
        port=0,
        tls=True,
        start_timeout_s=2 * HANG_S,
        settings=[f"{name}={value}" for name, value in SETTINGS.items()],
    )
    asked = [prompt(n, seed=n) for n in (300, 20, 45)]
    expected = [oracle(MODEL).greedy(ids, 6) for ids in asked]
    async with (
        Stack(given) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):

        async def serves() -> bool:
            return (await client.get("/ready")).status_code == 200

        async def answers() -> list[list[int]]:
            await eventually(serves)
            return await asyncio.gather(*(greedy_ids(client, ids, 6) for ids in asked))

        try:
            pods, texts = group(stack)
            first = process_of(stack, FIRST, pods.first, texts)
            later = process_of(stack, LATER, pods.later, texts)

            async def is_alive() -> bool:
                return await probe(FIRST, pods.first, "startupProbe") == 200

            async def is_ready() -> bool:
                return await probe(FIRST, pods.first, "readinessProbe") == 200

            starting = asyncio.create_task(first.start(2 * HANG_S))
            # It is alive while it waits for the pod of the later stage, and not ready.
            await eventually(is_alive)
            assert await probe(FIRST, pods.first, "readinessProbe") == 503
            await later.start(2 * HANG_S)
            await starting
            await eventually(is_ready)  # it serves, and then the scheduler knows it
            assert await probe(FIRST, pods.first, "livenessProbe") == 200
            for name in ("startupProbe", "livenessProbe", "readinessProbe"):
                assert await probe(LATER, pods.later, name) == 200
            assert await answers() == expected

            async with restarted(first, later):
                assert later.process is not None
                later.process.kill()
                await eventually(lambda: first.restarts and later.restarts)
                assert f"{ADDRESSES[LATER]}:7071" in first.log_path.read_text()
                await eventually(lambda: first.serving and later.serving)
                assert await answers() == expected
        except BaseException:
            print_logs(stack)
            raise
