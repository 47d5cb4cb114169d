"""A whole stack whose services each have their own user of Redis, and no more rights than it."""

from __future__ import annotations

import signal

import httpx
import pytest
from redis.asyncio import Redis

from millrace.bench.common.lasting_answer import LastingAnswer
from millrace.local.stack import Stack
from millrace.state.redis.access import user_of
from support.deadlines import HANG_S, eventually
from support.fault_scene import signal_to
from support.live_stack import live_stack
from support.redis_servers import HOST, PRIMARY, redis_server
from support.served_model import served_folder
from support.stores import add_users, as_service

pytestmark = pytest.mark.slow

URL = f"redis://{HOST}:{PRIMARY}/0"
BODY = {"model": "tiny", "prompt": "Once", "max_tokens": 8, "temperature": 0}


async def begin_again(stack: Stack) -> None:
    """Starts every service again, each with its own user."""
    pids = {name: service.serving_pid for name, service in stack.services.items()}
    for name, service in stack.services.items():
        own = as_service(URL, name.partition("-")[0])
        given = f"store.url={URL}"
        service.arguments = [f"store.url={own}" if a == given else a for a in service.arguments]
    for pid in pids.values():
        assert pid is not None
        signal_to(pid, signal.SIGTERM)
    services = stack.services.items()
    await eventually(lambda: all(s.serving_pid not in (None, pids[name]) for name, s in services))


async def users_of(admin: Redis) -> set[str]:
    return {one["user"] for one in await admin.client_list()} - {"default"}


async def test_every_service_has_its_own_user() -> None:
    async with redis_server(PRIMARY) as admin:
        await add_users(admin)
        layout = {"prefill": 1, "decode": 1, "kvp": 1, "redis_url": URL}
        async with (
            live_stack(served_folder("llama"), **layout) as stack,
            httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
        ):
            await begin_again(stack)
            services = ("proxy", "scheduler", "prefill", "decode", "kvp")
            wanted = {user_of(service, "millrace") for service in services}

            async def has_all() -> bool:
                ready = (await client.get("/ready")).status_code == httpx.codes.OK
                return ready and await users_of(admin) == wanted

            await eventually(has_all)
            plain = await client.post("/v1/completions", json=BODY)
            assert plain.status_code == httpx.codes.OK, plain.text
            answer = LastingAnswer("/v1/completions", {**BODY, "return_token_ids": True})
            assert (await answer.read(client, silence_s=HANG_S)).finish
            stored = await client.post(
                "/v1/responses", json={"model": "tiny", "input": "Once", "max_output_tokens": 16}
            )
            assert stored.status_code == httpx.codes.OK, stored.text
            found = await client.get(f"/v1/responses/{stored.json()['id']}")
            assert found.status_code == httpx.codes.OK, found.text
            upload = await client.post(
                "/v1/files",
                data={"purpose": "batch"},
                files={"file": ("a.jsonl", b'{"custom_id": "a"}\n')},
            )
            assert upload.status_code == httpx.codes.OK, upload.text
            assert (await client.get("/v1/files")).json()["data"]
            assert await admin.execute_command("ACL", "LOG") == []
