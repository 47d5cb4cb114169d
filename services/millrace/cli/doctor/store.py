"""What `millrace doctor` checks of the request store."""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from millrace.cli.doctor.findings import FAILURE, OK, WARNING, Finding
from millrace.core.config import StoreConfig
from millrace.state.open import in_memory
from millrace.state.redis.link import LARGE_ANSWER_S, RedisLink
from millrace.state.redis.pools import shown_url
from millrace.state.store import StoreError

PINGS = 50
#: A token's journal and a prompt wait for one answer each.
SLOW_PING_S = 0.005
MOST_SKEW_S = 1.0


async def store(config: StoreConfig) -> AsyncIterator[Finding]:
    """Yields whether Redis answers, how fast, whether its clock agrees, and whether it evicts; of a
    cluster of each primary.
    """
    if in_memory(config):
        advice = "give --set store.url=redis://HOST:PORT, or the file of the services by --config"
        yield Finding(WARNING, "store", "no URL was given: not checked", advice)
        return
    link = RedisLink(config)
    try:
        seen = await link.each(_look, LARGE_ANSWER_S)
    except (RedisError, OSError, StoreError) as error:
        advice = "start Redis, or correct store.url; without it new requests get 503"
        name = f"store {shown_url(config.url)}"
        yield Finding(FAILURE, name, f"does not answer: {error}", advice)
        return
    finally:
        await link.close()
    for server, one in seen.items():
        name = f"store {server}"
        yield Finding(OK, name, f"Redis {one.info['redis_version']} answers")
        yield latency(name, one.pings_s)
        yield skew(name, one.skew_s)
        policy, most_bytes = one.info.get("maxmemory_policy"), one.info.get("maxmemory", 0)
        yield eviction(name, str(policy), int(most_bytes))


def latency(name: str, pings: list[float]) -> Finding:
    """`pings`: seconds of each answer."""
    text = f"answers in {1e3 * statistics.median(pings):.2f} ms, {1e3 * max(pings):.2f} ms at most"
    if statistics.median(pings) <= SLOW_PING_S:
        return Finding(OK, name, text)
    return Finding(WARNING, name, text, "place Redis near the proxies, or look at its SLOWLOG")


def skew(name: str, skew_s: float) -> Finding:
    """`skew_s`: a clock's seconds ahead of this machine's."""
    text = f"its clock is {abs(skew_s):.3f} s {'ahead' if skew_s > 0 else 'behind'}"
    if abs(skew_s) <= MOST_SKEW_S:
        return Finding(OK, name, text)
    return Finding(WARNING, name, text, "run chrony or ntpd: traces and waterfalls mix clocks")


def eviction(name: str, policy: str, most_bytes: int) -> Finding:
    """`most_bytes`: Redis' maxmemory; 0: none."""
    if not most_bytes or policy == "noeviction":
        return Finding(OK, name, f"evicts nothing (maxmemory {most_bytes}, {policy})")
    return Finding(
        FAILURE,
        name,
        f"may evict records of running requests (maxmemory-policy {policy})",
        "set maxmemory-policy to noeviction",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What a server tells; pings and clock as `latency` and `skew` take them."""

    info: Mapping[str, Any]
    pings_s: list[float]
    skew_s: float


async def _look(client: Redis) -> _Seen:
    info = await client.info()
    pings_s = [await _timed(client) for _ in range(PINGS)]
    seconds, microseconds = await client.time()
    skew_s = int(seconds) + int(microseconds) / 1e6 - time.time()
    return _Seen(info=info, pings_s=pings_s, skew_s=skew_s)


async def _timed(client: Redis) -> float:
    begun_s = time.perf_counter()
    await client.ping()
    return time.perf_counter() - begun_s
