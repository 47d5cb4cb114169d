"""The id of a refused request is free again, whatever the store had taken of the request."""

from __future__ import annotations

import asyncio

import pytest

from millrace.proxy.streams import lives
from support.deadlines import eventually
from support.gateway import MODEL, Script, gateway
from support.redis_servers import HOST, PRIMARY, redis_server
from support.relay import relay

COMPLETIONS = "/v1/completions"
BODY = {"model": MODEL, "prompt": "hi", "stream": True, "max_tokens": 8}
NAMED = {"x-millrace-request-id": "mine"}
RESUMABLE = {**NAMED, "x-millrace-resumable": "1"}


@pytest.fixture
async def stalling(tmp_path):
    """A proxy, the network before its store, the store, and another proxy beside the network."""
    async with (
        redis_server(PRIMARY) as store,
        relay(HOST, PRIMARY) as network,
        gateway(tmp_path / "a", f"store.url=redis://127.0.0.1:{network.port}") as stack,
        gateway(tmp_path / "b", f"store.url=redis://{HOST}:{PRIMARY}") as other,
    ):
        first = await stack.http.post(COMPLETIONS, json=BODY, headers=RESUMABLE)
        assert first.status_code == 200  # it has connections to the store now
        await eventually(lambda: all_over(store))
        await store.delete(*await keys(store))
        yield stack, network, store, other


async def keys(store):
    """Returns the keys of requests and streams."""
    return await store.keys("millrace:request:*") + await store.keys("millrace:stream:*")


async def all_over(store):
    """Returns whether no proxy has more to write of any request or stream."""
    hashes = [key for key in await keys(store) if key.endswith(b"}")]
    found = [await store.hmget(key, "final", "kept") for key in hashes]
    return all(final and not kept for final, kept in found)


async def refused_unheard(stalling, headers):
    """Has a request refused whose record the store has: the store's answer was lost."""
    stack, network, store, _ = stalling
    network.mute()
    asking = asyncio.create_task(stack.http.post(COMPLETIONS, json=BODY, headers=headers))
    await eventually(lambda: keys(store))
    network.cut()
    refused = await asking
    assert refused.status_code == 503, refused.text
    assert await keys(store)


@pytest.mark.parametrize("headers", [NAMED, RESUMABLE])
async def test_its_client_asks_again_with_the_same_id(stalling, headers):
    stack, network, _, _ = stalling
    await refused_unheard(stalling, headers)
    network.heal()
    again = await stack.http.post(COMPLETIONS, json=BODY, headers=headers)
    assert again.status_code == 200, again.text
    taken = await stack.http.post(COMPLETIONS, json=BODY, headers=headers)
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "request_id_taken")


@pytest.mark.parametrize("headers", [NAMED, RESUMABLE])
async def test_its_client_asks_another_replica_with_the_same_id(stalling, headers):
    _, network, store, other = stalling
    await refused_unheard(stalling, headers)
    network.heal()

    async def is_free():
        return not await keys(store)

    await eventually(is_free)
    again = await other.http.post(COMPLETIONS, json=BODY, headers=headers)
    assert again.status_code == 200, again.text


async def test_another_replica_frees_the_id_of_a_refused_stream(stalling, monkeypatch):
    """The replica that has refused it is still cut off from the store."""
    _, _, store, other = stalling
    monkeypatch.setattr(lives, "LEASE_S", 0.0)
    await refused_unheard(stalling, RESUMABLE)
    taken = await other.http.post(COMPLETIONS, json=BODY, headers=RESUMABLE)
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "request_id_taken")
    waiting = await other.http.get("/v1/requests/mine/stream")
    assert '"code":"unavailable"' in waiting.text and not await keys(store)
    again = await other.http.post(COMPLETIONS, json=BODY, headers=RESUMABLE)
    assert again.status_code == 200, again.text


async def test_a_replica_removes_no_request_of_another(stalling):
    """The client of a refused request has asked another replica meanwhile."""
    stack, network, store, other = stalling
    await refused_unheard(stalling, RESUMABLE)
    await store.delete(*await keys(store))  # they expire
    other.fleet.script = Script(hold=asyncio.Event())
    asking = asyncio.create_task(other.http.post(COMPLETIONS, json=BODY, headers=RESUMABLE))
    await other.begun()
    network.heal()
    taken = await stack.http.post(COMPLETIONS, json=BODY, headers=RESUMABLE)
    assert taken.status_code == 409
    other.fleet.script.hold.set()
    assert (await asking).status_code == 200
    assert len(await keys(store)) > 1
