"""The stores on a Redis Cluster: its servers are real."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from millrace.cli.doctor.findings import OK
from millrace.cli.doctor.store import store as checked
from millrace.core.config import StoreConfig
from millrace.state.open import open_records, open_waterfalls
from millrace.state.outcomes import RedisOutcomes
from millrace.state.redis import cluster as cluster_module
from millrace.state.redis.cluster import Cluster
from millrace.state.redis.leases import RedisLeases
from millrace.state.redis.pools import shown_url
from millrace.state.redis.store import RedisStore
from millrace.state.redis.streams import RedisStreams
from millrace.state.store import JournalEntry, StateUpdate, StoreError
from millrace.state.streams import Lease
from support.deadlines import HANG_S, eventually
from support.redis_cluster import OWN_PORT, ClusterServers, Node, key_slot, redis_cluster
from support.redis_servers import HOST, PRIMARY, redis_server
from support.stores import as_service, in_the_end

IDS = np.arange(5, dtype=np.int32)
#: Requests on all servers.
NAMES = [f"r{i}" for i in range(12)]
#: Requests whose slots move, all to the same server: the servers agree on its word at once.
MOVED = [f"m{i}" for i in range(12)]
#: Redis has given up a failover that it was ordered to make so long ago: the machine was too busy.
GIVEN_UP_S = 6.0


@pytest.fixture
def servers(cluster: ClusterServers) -> ClusterServers:
    cluster.empty()
    return cluster


@pytest.fixture
def own() -> Iterator[ClusterServers]:
    with redis_cluster(OWN_PORT, replica=True) as servers:
        yield servers


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> list[Cluster]:
    """The stores' own views of the cluster, in the order in which they are opened."""
    made: list[Cluster] = []

    class Noted(Cluster):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr("millrace.state.redis.link.Cluster", Noted)
    return made


@asynccontextmanager
async def opened(servers: ClusterServers, **settings: float) -> AsyncIterator[RedisStore]:
    store = RedisStore(StoreConfig(url=servers.url, **settings))
    yield store
    await store.close()


def entry(name: str, start: int, *ids: int) -> JournalEntry:
    return JournalEntry(request_id=name, choice=0, start=start, token_ids=ids or [start])


def record(name: str) -> bytes:
    return f"millrace:request:{{{name}}}".encode()


async def journals(store: RedisStore) -> list[list[int]]:
    return [(await store.journal(name, 0)).tolist() for name in NAMES]


async def test_the_stores_go_on_at_the_replica_that_was_promoted(
    own: ClusterServers, clients: list[Cluster]
) -> None:
    config = StoreConfig(url=own.url)
    leases = RedisLeases(config)
    async with opened(own) as store, opened(own) as late:
        client = clients[1]  # the store's
        own.follow(own.owner(b"millrace:lease:scheduler"))
        for one in NAMES:
            await store.create(one, spec=b"s", prompt_ids=IDS)
        lease = await leases.acquire("scheduler", address="here", ttl_s=HANG_S)
        assert lease is not None
        assert {own.owner(record(one)) for one in NAMES} == set(own.primaries)
        for one in NAMES:
            assert await late.get(one) is not None
        own.replicated()
        known, gone = client.servers, (HOST, own.followed.port)
        assert gone in known
        os.kill(own.followed.pid, signal.SIGKILL)
        with pytest.raises(StoreError, match="connect"):
            await store.append_tokens([entry(one, 0) for one in NAMES])
        # The others' part was made.
        alive = [one for one in NAMES if own.owner(record(one)) is not own.followed]
        assert 0 < len(alive) < len(NAMES)
        for one in alive:
            assert (await store.journal(one, 0)).tolist() == [0]
        own.notice_soon()
        _, said = await in_the_end(lambda: store.append_tokens([entry(one, 0) for one in NAMES]))
        await store.append_tokens([entry(one, 1) for one in NAMES])
        assert await journals(store) == [[0, 1]] * len(NAMES)
        renewed, _ = await in_the_end(
            lambda: leases.renew("scheduler", epoch=lease.epoch, ttl_s=HANG_S, note=b"")
        )
        assert renewed
        # Who notices the death after the promotion loses no call.
        own.promoted()
        for one in NAMES:
            await late.create(f"{one}b", spec=b"s", prompt_ids=IDS)
        assert (
            own.replica is not None and own.replica.client.info("replication")["role"] == "master"
        )
        assert all(one.startswith(f"request store {shown_url(own.url)}: ") for one in said)
        await store.ping()
        assert gone not in known
    await leases.close()


async def test_a_failover_that_is_ordered_costs_no_call(own: ClusterServers) -> None:
    """The demoted server keeps its connections, and sends calls to the promoted one."""
    assert own.replica is not None
    async with opened(own, timeout_s=2 * HANG_S) as store:
        for one in NAMES:
            await store.create(one, spec=b"s", prompt_ids=IDS)
        own.replicated()
        steps, ordered_s = 0, -GIVEN_UP_S
        while own.replica.client.info("replication")["role"] != "master":
            if time.monotonic() - ordered_s > GIVEN_UP_S:
                own.replica.client.execute_command("CLUSTER", "FAILOVER")
                ordered_s = time.monotonic()
            await store.append_tokens([entry(one, steps) for one in NAMES])
            steps += 1
        await store.append_tokens([entry(one, steps) for one in NAMES])
        assert await journals(store) == [list(range(steps + 1))] * len(NAMES)


async def test_a_silent_primary_is_left_when_its_replica_is_promoted(own: ClusterServers) -> None:
    async with opened(own, timeout_s=0.5) as store:
        for one in NAMES:
            await store.create(one, spec=b"s", prompt_ids=IDS)
        own.replicated()
        os.kill(own.followed.pid, signal.SIGSTOP)
        own.notice_soon()
        await in_the_end(lambda: store.append_tokens([entry(one, 0) for one in NAMES]))
        assert await journals(store) == [[0]] * len(NAMES)


async def test_a_primary_that_is_cut_off_is_left_though_it_answers(own: ClusterServers) -> None:
    """It takes no calls (CLUSTERDOWN), and its map stays as it was."""
    assert own.replica is not None
    async with opened(own) as store:
        for one in NAMES:
            await store.create(one, spec=b"s", prompt_ids=IDS)
        own.replicated()
        for node in own.nodes:
            if node is not own.followed:
                own.followed.client.execute_command("CLUSTER", "FORGET", node.id)
        own.replica.client.execute_command("CLUSTER", "FAILOVER", "TAKEOVER")
        own.promoted()
        await eventually(lambda: own.followed.state() == "fail")
        for name in NAMES:
            await store.create(f"{name}b", spec=b"s", prompt_ids=IDS)
        await store.append_tokens([entry(one, 0) for one in NAMES])
        assert await journals(store) == [[0]] * len(NAMES)


class Pauses:
    """Pauses without end. `passed` is set by a call that has been sent on three times."""

    def __init__(self) -> None:
        self.passed = asyncio.Event()

    def __iter__(self) -> Iterator[float]:
        yield from (0.0, 0.0, 0.0)
        self.passed.set()
        while True:
            yield 0.01


async def test_a_slot_moves_key_by_key(
    servers: ClusterServers, clients: list[Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = servers.primaries[0], servers.primaries[2]
    one = next(name for name in MOVED if servers.owner(record(name)) is source)
    slot = key_slot(record(one))
    config = StoreConfig(url=as_service(servers.url, "proxy"))
    store, streams = RedisStore(config), RedisStreams(config)
    await store.create(one, spec=b"s", prompt_ids=IDS)
    await store.append_tokens([entry(one, 0)])
    pauses = Pauses()
    monkeypatch.setattr(cluster_module, "PAUSES_S", pauses)
    servers.begin_move(slot, source, target)
    # A key that is new goes to the target.
    lease = Lease(held_s=60.0, wanted_s=60.0)
    fields = {"tenant": "t", "source": b"", "body": b"", "lease": lease, "ttl_s": 60.0}
    await streams.create(one, **fields, fence=1)
    assert servers.keys(slot, target) == [f"millrace:stream:{{{one}}}".encode()]
    found = await streams.get(one)
    assert found is not None and found.fence == 1
    # Of a request's keys one has moved.
    servers.move_keys([record(one)], source, target)
    found = await store.get(one)
    assert found is not None and found.spec == b"s"
    assert (await store.prompt_ids(one)).tolist() == IDS.tolist()
    assert [one.tolist() for one in await store.prompt_slices(one, [(0, 2), (3, 4)])] == [
        [0, 1],
        [3],
    ]
    await store.set_states([StateUpdate(request_id=one, state="decoding", decode_id="d")])
    found = await store.get(one)
    assert found is not None and found.state == "decoding"
    # A script of keys at both waits for the others.
    appended = asyncio.create_task(store.append_tokens([entry(one, 1), entry("b", 0)]))
    await asyncio.wait(
        {appended, asyncio.create_task(pauses.passed.wait())}, return_when="FIRST_COMPLETED"
    )
    assert not appended.done()
    servers.move_keys(servers.keys(slot, source), source, target)
    await appended
    await store.append_tokens([entry(one, 2)])
    # The server that had the slot is asked for the map: another one may not know of the move yet.
    clients[0].ask_first((HOST, servers.primaries[1].port))
    asked: list[str] = []
    slots = cluster_module.read_slots
    monkeypatch.setattr(
        cluster_module, "read_slots", lambda server: asked.append(server.name) or slots(server)
    )
    servers.end_move(slot, source, target)
    await store.append_tokens([entry(one, 3)])
    assert asked == [f"{HOST}:{source.port}"]
    assert (await store.journal(one, 0)).tolist() == [0, 1, 2, 3]
    assert servers.owner(record(one)) is target
    await store.close()
    await streams.close()


async def test_slots_move_while_calls_run(
    servers: ClusterServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "PAUSES_S", Pauses())
    async with opened(servers) as store:
        for one in MOVED:
            await store.create(one, spec=b"s", prompt_ids=IDS)
        moved = asyncio.Event()
        steps = 0

        async def append() -> None:
            nonlocal steps
            while not moved.is_set() or steps < 5:
                await store.append_tokens([entry(one, steps) for one in MOVED])
                steps += 1

        appending = asyncio.create_task(append())
        target = servers.primaries[2]
        sources = {one: servers.owner(record(one)) for one in MOVED}
        assert len(set(sources.values())) > 1
        for one, source in sources.items():
            if source is not target:
                await asyncio.to_thread(_move, servers, key_slot(record(one)), source, target)
        moved.set()
        await appending
        for one in MOVED:
            assert servers.owner(record(one)) is target
            assert (await store.journal(one, 0)).tolist() == list(range(steps))


def _move(servers: ClusterServers, slot: int, source: Node, target: Node) -> None:
    servers.begin_move(slot, source, target)
    while keys := servers.keys(slot, source):
        servers.move_keys(keys[:1], source, target)
    servers.end_move(slot, source, target)


async def test_many_keys_are_found_at_all_servers(servers: ClusterServers) -> None:
    assert {servers.owner(record(name)).port for name in NAMES} == {
        node.port for node in servers.primaries
    }
    config = StoreConfig(url=as_service(servers.url, "proxy"))
    waterfalls, records = open_waterfalls(config), open_records(config, "file")
    assert waterfalls is not None
    of_one_slot = ["{tag}1", "{tag}2"]  # one script writes both
    names = [*NAMES, *of_one_slot]
    await waterfalls.put({name: name.encode() for name in names})
    assert await waterfalls.find([*names, "none"]) == [*(n.encode() for n in names), None]
    await waterfalls.remove(NAMES[1:])
    assert await waterfalls.find(NAMES[:2]) == [b"r0", None]
    for name in NAMES:
        await records.create(name, tenant="t", body=name.encode(), at_s=0.0, ttl_s=60.0)
    found = await records.get_many(NAMES)
    assert [one.body for one in found if one is not None] == [name.encode() for name in NAMES]
    await waterfalls.close()
    await records.close()


async def test_the_groups_of_all_servers_are_listed(servers: ClusterServers) -> None:
    scheduler = StoreConfig(url=as_service(servers.url, "scheduler"))
    for name in NAMES:
        outcomes = RedisOutcomes(scheduler, name)
        await outcomes.add_outcomes([b"a"], 10)
        await outcomes.close()
    tools = RedisOutcomes(StoreConfig(url=as_service(servers.url, "tools")), "")
    assert await tools.groups() == sorted(NAMES)
    await tools.close()


async def test_the_doctor_looks_at_every_primary(servers: ClusterServers) -> None:
    config = StoreConfig(url=as_service(servers.url, "tools"))
    findings = [one async for one in checked(config)]
    assert {one.subject for one in findings} == {
        f"store {HOST}:{node.port}" for node in servers.primaries
    }
    assert [one.level for one in findings if "answers in" not in one.text] == [OK] * 9


async def failure(url: str) -> str:
    store = RedisStore(StoreConfig(url=url))
    with pytest.raises(StoreError) as info:
        await store.ping()
    with pytest.raises(StoreError):
        await store.create("a", spec=b"", prompt_ids=IDS)
    await store.close()
    return str(info.value)


async def test_a_server_alone_is_no_cluster() -> None:
    async with redis_server(PRIMARY):
        assert "name it in a redis:// URL" in await failure(f"redis+cluster://{HOST}:{PRIMARY}")


async def test_a_cluster_without_all_slots_is_an_error() -> None:
    async with redis_server(PRIMARY, "cluster-enabled yes"):
        said = await failure(f"redis+cluster://{HOST}:{PRIMARY}")
        assert "16384 slots of the cluster have no server" in said


async def test_a_cluster_out_of_reach_is_an_error(servers: ClusterServers) -> None:
    said = await failure(f"redis+cluster://{HOST}:6,{HOST}:7")
    assert f"request store redis+cluster://{HOST}:6,{HOST}:7: no server of the cluster" in said
    wrong = as_service(servers.url, "proxy").replace("of-a-test", "wrong")
    said = await failure(wrong)
    assert "invalid username-password" in said and "wrong" not in said
