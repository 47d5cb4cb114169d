"""Keeps records in Redis, shared by all replicas of the proxy.

Leases are measured by the server's clock. A sorted set per tenant orders the pages, and another one
lists the open records with the time of their next claim: hints both, the record itself decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from redis.asyncio import Redis

from millrace.core.config import StoreConfig
from millrace.state.records import Record
from millrace.state.redis.keys import key_of
from millrace.state.redis.link import LARGE_ANSWER_S, RedisLink, as_bytes
from millrace.state.redis.scripts import NOW_MS, Script, ScriptCall

# A record's fields: tenant, body, version, owner, lease_until (ms of the server's clock); `final`
# once it is final.
# ARGV: tenant, body, final or '', time to live in ms.
_CREATE = Script(
    """
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'tenant', ARGV[1], 'body', ARGV[2], 'version', 1, 'owner', '',
  'lease_until', 0)
if ARGV[3] ~= '' then redis.call('HSET', KEYS[1], 'final', ARGV[3]) end
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return 1
"""
)
# ARGV: version, body, final or ''.
_SWAP = Script(
    """
local known = redis.call('HMGET', KEYS[1], 'version', 'final')
if known[1] ~= ARGV[1] or known[2] then return 0 end
redis.call('HSET', KEYS[1], 'body', ARGV[2])
redis.call('HINCRBY', KEYS[1], 'version', 1)
if ARGV[3] ~= '' then redis.call('HSET', KEYS[1], 'final', ARGV[3]) end
return 1
"""
)
# ARGV: owner, lease in ms. Returns 1, 0 if another has a lease, or -1 if none can claim it again.
_CLAIM = Script(
    NOW_MS
    + """
local known = redis.call('HMGET', KEYS[1], 'version', 'final', 'lease_until')
if not known[1] or known[2] then return -1 end
local now, ends = now_ms(), tonumber(known[3])
if ends > now then
  if ends > now + tonumber(ARGV[2]) then  -- the clock was set back: nobody waits longer than this
    redis.call('HSET', KEYS[1], 'lease_until', now + tonumber(ARGV[2]))
  end
  return 0
end
redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'lease_until', now + tonumber(ARGV[2]))
redis.call('HINCRBY', KEYS[1], 'version', 1)
return 1
"""
)
# ARGV: owner, lease in ms.
_RENEW = Script(
    NOW_MS
    + """
local known = redis.call('HMGET', KEYS[1], 'owner', 'final')
if known[1] ~= ARGV[1] or known[2] then return 0 end
redis.call('HSET', KEYS[1], 'lease_until', now_ms() + tonumber(ARGV[2]))
return 1
"""
)
# ARGV: owner.
_RELEASE = Script(
    """
local known = redis.call('HMGET', KEYS[1], 'owner', 'final')
if known[1] ~= ARGV[1] or known[2] then return 0 end
redis.call('HSET', KEYS[1], 'owner', '', 'lease_until', 0)
redis.call('HINCRBY', KEYS[1], 'version', 1)
return 1
"""
)
# KEYS: open records. ARGV: a record, ms until its next claim, or 0: at once.
_HINT = Script(
    NOW_MS
    + """
local in_ms = tonumber(ARGV[2])
local at_s = in_ms > 0 and (now_ms() + in_ms) / 1000 or 0
return redis.call('ZADD', KEYS[1], string.format('%.3f', at_s), ARGV[1])
"""
)
#: Longer than any lease: a later hint is from before the server's clock was set back.
_LONGEST_S = 600
# KEYS: open records. ARGV: how many. The record itself decides whether it can be claimed.
_CLAIMABLE = Script(
    NOW_MS
    + f"""
local now_s, count = now_ms() / 1000, tonumber(ARGV[1])
local function listed(from, to)
  return redis.call('ZRANGEBYSCORE', KEYS[1], from, to, 'LIMIT', 0, count)
end
local found = listed('-inf', string.format('%.3f', now_s))
local late = listed(string.format('(%.3f', now_s + {_LONGEST_S}), '+inf')
for i = 1, math.min(count - #found, #late) do found[#found + 1] = late[i] end
return found
"""
)
_FIELDS = ("tenant", "body", "version", "owner", "final")


class RedisRecords:
    """A RecordStore over Redis."""

    def __init__(self, config: StoreConfig, kind: str) -> None:
        """Connects at the first call. Raises ConfigError when `config.url` is not valid."""
        self._link = RedisLink(config)
        self._stem = config.key_prefix, kind
        self._open = key_of(*self._stem, "open")

    async def create(
        self,
        record_id: str,
        *,
        tenant: str,
        body: bytes,
        at_s: float,
        ttl_s: float,
        final: bool = False,
    ) -> None:
        arguments = (tenant, body, "1" if final else "", round(ttl_s * 1000))
        await self._run(_CREATE, record_id, *arguments)
        if not final:
            await self._hint(record_id, 0.0)
        index, row = self._index(tenant), {record_id: at_s}
        await self._link.again(index, lambda client: client.zadd(index, row))

    async def get(self, record_id: str) -> Record | None:
        [found] = await self.get_many([record_id])
        return found

    async def get_many(self, record_ids: Sequence[str]) -> list[Record | None]:
        if not record_ids:
            return []
        keys = [self._key(record_id) for record_id in record_ids]
        rows = await self._link.by_key(
            keys, lambda pipe, key: pipe.hmget(key, _FIELDS), LARGE_ANSWER_S
        )
        return [_record(name, row) for name, row in zip(record_ids, rows, strict=True)]

    async def swap(self, old: Record, body: bytes, *, final: bool = False) -> bool:
        swapped = await self._run(
            _SWAP, old.record_id, str(old.version), body, "1" if final else ""
        )
        if swapped and final:
            await self._unlist(self._open, old.record_id)
        return bool(swapped)

    async def delete(self, record_id: str, tenant: str) -> bool:
        key = self._key(record_id)
        found = await self._link.again(key, lambda client: client.unlink(key))
        await self._unlist(self._open, record_id)
        await self._unlist(self._index(tenant), record_id)
        return bool(found)

    async def page(
        self, tenant: str, *, after: str | None, count: int, newest_first: bool
    ) -> list[str] | None:
        index, start = self._index(tenant), 0
        if after is not None:
            place = Redis.zrevrank if newest_first else Redis.zrank
            found = await self._link.again(index, lambda client: place(client, index, after))
            if not isinstance(found, int):
                return None
            start = found + 1
        end = start + count - 1
        rows = await self._link.again(
            index, lambda client: client.zrange(index, start, end, desc=newest_first)
        )
        return _names(rows)

    async def claimable(self, count: int) -> list[str]:
        return _names(await self._link.run(ScriptCall(_CLAIMABLE, [self._open], (count,))))

    async def claim(self, record_id: str, owner: str, lease_s: float) -> Record | None:
        claimed = await self._run(_CLAIM, record_id, owner, round(lease_s * 1000))
        if claimed < 0:
            await self._unlist(self._open, record_id)
        if claimed == 0:
            await self._hint(record_id, lease_s)
        if claimed != 1:
            return None
        await self._hint(record_id, lease_s)
        found = await self.get(record_id)
        return found if found is not None and found.owner == owner else None

    async def renew(self, record_id: str, owner: str, lease_s: float) -> bool:
        renewed = await self._run(_RENEW, record_id, owner, round(lease_s * 1000))
        if renewed:
            await self._hint(record_id, lease_s)
        return bool(renewed)

    async def release(self, record_id: str, owner: str) -> None:
        if await self._run(_RELEASE, record_id, owner):
            await self._hint(record_id, 0.0)

    async def close(self) -> None:
        await self._link.close()

    async def _run(self, script: Script, record_id: str, *arguments: bytes | str | int) -> int:
        call = ScriptCall(script, [self._key(record_id)], arguments)
        return int(await self._link.run(call))

    async def _hint(self, record_id: str, in_s: float) -> None:
        """Lists an open record to be claimed after `in_s`."""
        await self._link.run(ScriptCall(_HINT, [self._open], (record_id, round(in_s * 1000))))

    async def _unlist(self, index: bytes, record_id: str) -> None:
        await self._link.again(index, lambda client: client.zrem(index, record_id))

    def _key(self, record_id: str) -> bytes:
        return key_of(*self._stem, f"{{{record_id}}}")

    def _index(self, tenant: str) -> bytes:
        return key_of(*self._stem, "of", tenant)


class RedisDeadlines:
    """Deadlines over Redis: a sorted set by time."""

    def __init__(self, config: StoreConfig, kind: str) -> None:
        """Connects at the first call. Raises ConfigError when `config.url` is not valid."""
        self._link = RedisLink(config)
        self._key = key_of(config.key_prefix, kind, "deadlines")

    async def set(self, names: Sequence[str], at_s: float) -> None:
        if names:
            rows = dict.fromkeys(names, at_s)
            await self._link.again(self._key, lambda client: client.zadd(self._key, rows))

    async def passed(self, now_s: float, count: int) -> list[str]:
        rows = await self._link.again(
            self._key,
            lambda client: client.zrangebyscore(self._key, "-inf", f"({now_s}", start=0, num=count),
        )
        return _names(rows)

    async def forget(self, names: Sequence[str]) -> None:
        if names:
            await self._link.again(self._key, lambda client: client.zrem(self._key, *names))

    async def close(self) -> None:
        await self._link.close()


def _names(rows: Iterable[object]) -> list[str]:
    """Returns the members of a sorted set, without scores."""
    return [row.decode() for row in rows if isinstance(row, bytes)]


def _record(record_id: str, row: Sequence[bytes | None]) -> Record | None:
    tenant, body, version, owner, final = row
    if version is None:
        return None
    return Record(
        record_id=record_id,
        tenant=as_bytes(tenant).decode(),
        body=as_bytes(body),
        version=int(version),
        owner=as_bytes(owner).decode(),
        final=final is not None,
    )
