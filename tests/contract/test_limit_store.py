"""What every LimitStore does by the same clock: in memory, on a real redis-server, on a cluster."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import Redis

from millrace.core.config import StoreConfig
from millrace.core.limits.rules import DAY_MS, Charge, Cost, Limits, charges, corrections
from millrace.state.limits import AccountCharge, LimitStore, MemoryLimits, Verdict
from millrace.state.open import open_limits
from millrace.state.redis.limits import RedisLimits
from millrace.state.store import StoreError
from support.stores import chosen_redis, patient, private_redis

NOON_S = 20_000 * DAY_MS / 1000 + 43_200
LEASE_MS = 30_000


class Clock:
    def __init__(self) -> None:
        self.now_s = NOON_S

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@asynccontextmanager
async def opened(url: str, clock: Clock) -> AsyncIterator[LimitStore]:
    store = RedisLimits(patient(url), clock=clock)
    yield store
    await store.close()


@pytest.fixture(params=["memory", "redis", "cluster"])
async def store(request: pytest.FixtureRequest, clock: Clock) -> AsyncIterator[LimitStore]:
    if request.param == "memory":
        yield MemoryLimits(clock=clock)
        return
    async with chosen_redis(request, "proxy") as url, opened(url, clock) as found:
        yield found


def account(limits: Limits, tokens: int = 0, *, name: str = "tenant", prompt: int = 0):
    found = charges(limits, Cost(prompt_tokens=prompt, generated_tokens=tokens))
    assert isinstance(found, list)
    return AccountCharge(
        group="acme", account=name, concurrency=limits.concurrency, charges=tuple(found)
    )


def fixed(wanted: AccountCharge, used: int) -> AccountCharge:
    cost = Cost(prompt_tokens=0, generated_tokens=used)
    return AccountCharge(
        group=wanted.group,
        account=wanted.account,
        concurrency=wanted.concurrency,
        charges=corrections(wanted.charges, cost),
    )


async def admit(store: LimitStore, lease: str, *accounts: AccountCharge) -> Verdict:
    return await store.admit(lease, LEASE_MS, accounts)


async def test_requests_are_admitted_up_to_the_limit_and_told_when_to_come_again(store, clock):
    wanted = account(Limits(requests_per_minute=3))
    left = [(await admit(store, f"r{i}", wanted)).levels[0].left for i in range(3)]
    assert left == [2, 1, 0]
    verdict = await admit(store, "r3", wanted)
    assert not verdict.admitted
    assert (verdict.refused, verdict.account) == ("requests_per_minute", "tenant")
    assert verdict.wait_ms == 20_000
    assert verdict.levels[0].reset_ms == 60_000
    clock.now_s += 19.999
    assert not (await admit(store, "r3", wanted)).admitted
    clock.now_s += 0.001
    assert (await admit(store, "r3", wanted)).admitted


async def test_a_repeated_call_is_charged_once(store):
    wanted = account(Limits(requests_per_minute=3, concurrency=1))
    for _ in range(3):
        verdict = await admit(store, "same", wanted)
        assert verdict.admitted and verdict.levels[0].used == 1
    await store.settle("same", [wanted])
    await store.settle("same", [wanted])
    assert (await admit(store, "", wanted)).levels[0].used == 2  # settled by a charge of one


async def test_unused_tokens_are_given_back_and_overdrawn_ones_are_paid(store):
    limits = Limits(tokens_per_minute=100, tokens_per_day=1000)
    wanted = account(limits, 90)
    assert (await admit(store, "a", wanted)).admitted
    assert (await admit(store, "b", account(limits, 11))).refused == "tokens_per_minute"
    await store.settle("a", [fixed(wanted, 20)])
    shown = await admit(store, "", account(limits))
    assert [level.used for level in shown.levels] == [20, 20]
    wanted = account(limits, 80)
    assert (await admit(store, "c", wanted)).admitted
    await store.settle("c", [fixed(wanted, 280)])
    shown = await admit(store, "", account(limits))
    assert [(level.used, level.left) for level in shown.levels] == [(300, 0), (300, 700)]


async def test_a_day_ends_at_midnight(store, clock):
    limits = Limits(tokens_per_day=100)
    assert (await admit(store, "a", account(limits, 100))).admitted
    verdict = await admit(store, "b", account(limits, 1))
    assert (verdict.refused, verdict.wait_ms) == ("tokens_per_day", DAY_MS // 2)
    clock.now_s += DAY_MS / 2000
    assert (await admit(store, "b", account(limits, 1))).admitted


async def test_open_requests_are_counted_until_they_are_settled(store):
    wanted = account(Limits(concurrency=2))
    assert (await admit(store, "a", wanted)).admitted
    assert (await admit(store, "b", wanted)).admitted
    verdict = await admit(store, "c", wanted)
    assert (verdict.refused, verdict.wait_ms) == ("concurrency", 0)
    await store.settle("a", [wanted])
    assert (await admit(store, "c", wanted)).admitted
    assert not (await admit(store, "d", wanted)).admitted


async def test_a_lease_ends_by_itself_unless_it_is_renewed(store, clock):
    wanted = account(Limits(concurrency=2))
    await admit(store, "dead", wanted)
    await admit(store, "alive", wanted)
    clock.now_s += 20
    await store.renew([("acme", "tenant", "alive")], LEASE_MS)
    clock.now_s += 10
    assert (await admit(store, "new", wanted)).admitted
    assert not (await admit(store, "more", wanted)).admitted
    clock.now_s += 20
    assert (await admit(store, "more", wanted)).admitted


@pytest.mark.parametrize("step_s", [3600, -3600])
async def test_a_step_of_the_clock_closes_no_bucket(store, clock, step_s):
    wanted = account(Limits(requests_per_minute=1))
    assert (await admit(store, "before", wanted)).admitted
    clock.now_s += step_s
    assert (await admit(store, "after", wanted)).admitted
    verdict = await admit(store, "more", wanted)
    assert (verdict.refused, verdict.wait_ms) == ("requests_per_minute", 60_000)
    clock.now_s += 60
    assert (await admit(store, "more", wanted)).admitted


async def test_a_clock_that_is_set_back_lengthens_no_lease_of_the_dead(store, clock):
    wanted = account(Limits(concurrency=1))
    assert (await admit(store, "dead", wanted)).admitted
    clock.now_s -= 3600
    assert not (await admit(store, "new", wanted)).admitted
    clock.now_s += LEASE_MS / 1000
    assert (await admit(store, "new", wanted)).admitted


async def test_all_accounts_are_charged_or_none(store):
    tenant = account(Limits(requests_per_minute=10))
    key = account(Limits(requests_per_minute=1), name="key")
    assert (await admit(store, "a", tenant, key)).admitted
    verdict = await admit(store, "b", tenant, key)
    assert (verdict.account, verdict.refused) == ("key", "requests_per_minute")
    assert [level.used for level in verdict.levels] == [1, 1]


async def test_the_longest_wait_is_told(store):
    limits = Limits(requests_per_minute=1, tokens_per_day=10, concurrency=1)
    assert (await admit(store, "a", account(limits, 10))).admitted
    verdict = await admit(store, "b", account(limits, 10))
    assert (verdict.refused, verdict.wait_ms) == ("tokens_per_day", DAY_MS // 2)


async def test_fifty_at_once_get_exactly_what_there_is(store):
    wanted = account(Limits(requests_per_minute=20, tokens_per_day=10**6), 7)
    verdicts = await asyncio.gather(*(admit(store, f"r{i}", wanted) for i in range(50)))
    assert sum(verdict.admitted for verdict in verdicts) == 20
    shown = await admit(store, "", account(Limits(requests_per_minute=20, tokens_per_day=10**6)))
    assert [level.used for level in shown.levels] == [20, 140]


@pytest.mark.parametrize("seed", range(3))
async def test_both_stores_agree_on_every_step(seed, clock):
    rng = random.Random(seed)
    one = MemoryLimits(clock=clock)
    async with private_redis("proxy") as url, opened(url, clock) as other:
        live: dict[str, Sequence[AccountCharge]] = {}
        for step in range(400):
            clock.now_s += rng.choice((0, 0, 0.001, 0.5, 3, 40, 0.5, 3, 40, -3, 3600, -3600))
            if live and rng.random() < 0.4:
                lease = rng.choice(sorted(live))
                corrected = [fixed(charged, rng.randint(0, 400)) for charged in live.pop(lease)]
                await one.settle(lease, corrected)
                await other.settle(lease, corrected)
                continue
            wanted = random_accounts(rng)
            lease = rng.choice((f"r{step}", *live, ""))
            expected = await admit(one, lease, *wanted)
            assert await admit(other, lease, *wanted) == expected
            if expected.admitted and lease:
                live.setdefault(lease, wanted)


def random_accounts(rng: random.Random) -> list[AccountCharge]:
    tenant = Limits(requests_per_minute=50, tokens_per_minute=997, tokens_per_day=20_000)
    key = Limits(generated_tokens_per_minute=499, prompt_tokens_per_minute=301, concurrency=6)
    prompt, tokens = rng.randint(0, 200), rng.randint(0, 600)
    return [
        account(tenant, tokens, prompt=prompt),
        account(key, tokens, prompt=prompt, name="key"),
    ]


async def test_large_limits_stay_exact(clock):
    charge = Charge(meter="tokens_per_minute", limit=10**10, amount=10**10 - 1)
    wanted = AccountCharge(group="acme", account="t", concurrency=0, charges=[charge])
    one = AccountCharge(
        group="acme",
        account="t",
        concurrency=0,
        charges=[Charge(meter="tokens_per_minute", limit=10**10, amount=1)],
    )
    async with private_redis("proxy") as url, opened(url, clock) as store:
        assert (await admit(store, "a", wanted)).admitted
        assert (await admit(store, "b", one)).levels[0].left == 0
        assert not (await admit(store, "c", one)).admitted


async def test_redis_keeps_an_account_for_two_idle_days_and_times_by_its_own_clock():
    async with private_redis("proxy") as url:
        store = open_limits(patient(url))
        wanted = account(Limits(requests_per_minute=10, concurrency=5))
        assert (await admit(store, "a", wanted)).admitted
        async with Redis.from_url(url) as client:
            meters = b"millrace:limits:{acme}:tenant"
            assert 0 < await client.pttl(meters) <= 2 * DAY_MS
            assert 0 < await client.pttl(meters + b":open") <= LEASE_MS
            seconds, _ = await client.time()
            stored = int(await client.hget(meters, "requests_per_minute@"))
            assert abs(stored / 1000 - seconds) < 600
        await store.close()


async def test_a_store_out_of_reach_is_an_error():
    store = open_limits(StoreConfig(url="redis://127.0.0.1:1"))
    wanted = account(Limits(requests_per_minute=1))
    with pytest.raises(StoreError):
        await admit(store, "a", wanted)
    await store.close()
