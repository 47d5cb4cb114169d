"""GET /v1/requests/{id}: how far a request is, on its own replica and on another."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from hashlib import sha256

import pytest

from millrace.core.config import StoreConfig, TenantConfig, load_config
from millrace.core.request import RequestState
from millrace.core.scheduler.fleet.prompt_progress import PromptProgress
from millrace.state.store import JournalEntry, StateUpdate
from millrace.wire.fleet_messages import Progress
from support.deadlines import HANG_S
from support.gateway import MODEL, Script, gateway
from support.live_stack import eventually
from support.stores import private_redis

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
NAMED = {"x-millrace-request-id": "my-request"}


@pytest.fixture
async def stack(tmp_path):
    async with gateway(tmp_path) as running:
        yield running


@pytest.fixture
async def replicas(tmp_path):
    """Two proxies with the same Redis, each with a scripted fleet of its own."""
    async with AsyncExitStack() as exits:
        url = await exits.enter_async_context(private_redis())
        yield [
            await exits.enter_async_context(gateway(tmp_path / name, f"store.url={url}"))
            for name in ("a", "b")
        ]


async def started(stack, **headers):
    """Starts a whole answer that waits for its first token; returns its task and its spec."""
    stack.fleet.script = Script(hold=asyncio.Event(), hold_after=0)
    asking = asyncio.create_task(stack.http.post(CHAT, json=BODY, headers={**NAMED, **headers}))
    await eventually(lambda: asking.done() or stack.fleet.submitted.is_set())
    assert not asking.done(), (await asking).text
    await stack.placed()
    return asking, stack.fleet.specs[-1]


def report(stack, spec, **fields):
    prompt = PromptProgress(**{"state": RequestState.QUEUED, "computed_tokens": 1, **fields})
    stack.fleet.progress[spec.request_id] = Progress(request_id=spec.request_id, prompt=prompt)


async def test_a_client_that_waits_sees_how_far_its_request_is(stack):
    asking, spec = await started(stack)
    report(stack, spec, left_s=5.0, queue_place=2)
    for name in ("my-request", spec.request_id):
        found = (await stack.http.get(f"/v1/requests/{name}")).json()
        assert 5.0 <= found.pop("predicted_ttft_s") <= 5.0 + HANG_S
        assert found == {
            "object": "millrace.request",
            "id": spec.request_id,
            "state": "queued",
            "created": int(spec.arrival_unix_s),
            "prompt_tokens": spec.prompt_tokens,
            "computed_tokens": 1,
            "completion_tokens": 0,
            "queue_place": 2,
            "left_s": 5.0,
        }
    stack.fleet.script.hold.set()
    answer = await asking
    assert answer.json()["id"] == answer.headers["x-request-id"] == spec.request_id

    async def ended():
        return (await stack.http.get("/v1/requests/my-request")).json()["state"] == "finished"

    await eventually(ended)


async def test_another_replica_asks_the_store_and_the_scheduler(replicas):
    one, other = replicas
    asking, spec = await started(one)
    report(other, spec, left_s=5.0, queue_place=2)
    path = "/v1/requests/my-request"
    found = (await other.http.get(path)).json()
    assert (found["id"], found["state"], found["queue_place"]) == (spec.request_id, "queued", 2)
    assert (found["prompt_tokens"], found["computed_tokens"]) == (spec.prompt_tokens, 1)
    assert 5.0 <= found["predicted_ttft_s"] <= 5.0 + HANG_S
    store = one.proxy.store
    await store.set_states([StateUpdate(request_id=spec.request_id, state="decoding")])
    await store.append_tokens(
        [JournalEntry(request_id=spec.request_id, choice=0, start=0, token_ids=[5, 6])]
    )
    found = (await other.http.get(path)).json()
    assert (found["state"], found["completion_tokens"]) == ("decoding", 2)
    assert (found["computed_tokens"], found["left_s"]) == (spec.prompt_tokens, None)
    one.fleet.script.hold.set()
    await asking

    async def ended():
        return (await other.http.get(path)).json()["state"] == "finished"

    await eventually(ended)


async def test_a_chosen_id_belongs_to_one_request(replicas):
    """A second request of the id is refused, and leaves the first request alone."""
    asking, spec = await started(replicas[0])
    for stack in replicas:
        refused = await stack.http.post(CHAT, json=BODY, headers=NAMED)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "request_id_taken")
    assert not replicas[0].fleet.cancels and not replicas[1].fleet.cancels
    assert await replicas[1].state_of(spec.request_id) == "queued"
    replicas[0].fleet.script.hold.set()
    assert (await asking).status_code == 200


@pytest.mark.parametrize("wrong", ["", "a b", "é", "x" * 65])
async def test_malformed_ids_are_refused(stack, wrong):
    headers = [(b"x-millrace-request-id", wrong.encode("latin-1"))]
    refused = await stack.http.post(CHAT, json=BODY, headers=headers)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "x-millrace-request-id"


async def test_unknown_requests_are_not_found(stack):
    found = await stack.http.get("/v1/requests/nothing")
    assert (found.status_code, found.json()["error"]["code"]) == (404, "request_not_found")


async def test_tenants_see_their_own_requests_only(tmp_path):
    async with private_redis() as url:
        tenants = {
            name: TenantConfig(key_sha256=(sha256(name.encode()).hexdigest(),))
            for name in ("ann", "bob")
        }
        config = replace(load_config(), tenants=tenants, store=StoreConfig(url=url))
        async with gateway(tmp_path, config=config) as stack:
            asking, spec = await started(stack, authorization="Bearer ann")
            for who, status in (("ann", 200), ("bob", 404)):
                for name in ("my-request", spec.request_id):
                    found = await stack.http.get(
                        f"/v1/requests/{name}", headers={"authorization": f"Bearer {who}"}
                    )
                    assert found.status_code == status, (who, name)
            stack.fleet.script.hold.set()
            await asking
            assert (await stack.http.post(CHAT, json=BODY, headers=NAMED)).status_code == 200
