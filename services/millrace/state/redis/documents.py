"""Keeps documents in Redis, shared by all replicas of the proxy.

Leases are measured by the server's clock. An update says at which event its events begin, so that
an update made twice, after a lost connection, appends them once.
"""

from __future__ import annotations

from hashlib import sha1

from millrace.core.config import StoreConfig
from millrace.state.documents import Change, Document
from millrace.state.redis.keys import key_of
from millrace.state.redis.link import LARGE_ANSWER_S, RedisLink, as_bytes
from millrace.state.redis.scripts import NOW_MS, Script, ScriptCall

# A document's fields: tenant, source, body, lease_until (ms of the server's clock); `final` once it
# is final. ARGV: body, first event, lease in ms, final or '', events.
_CHANGE = (
    NOW_MS
    + """
local until_ms = now_ms() + tonumber(ARGV[3])
redis.call('HSET', KEYS[1], 'body', ARGV[1], 'lease_until', until_ms)
if ARGV[4] ~= '' then redis.call('HSET', KEYS[1], 'final', ARGV[4]) end
local seen = redis.call('LLEN', KEYS[2]) - tonumber(ARGV[2])
for i = 5 + seen, #ARGV - kept do redis.call('RPUSH', KEYS[2], ARGV[i]) end
local ttl = redis.call('PTTL', KEYS[1])
if ttl > 0 then redis.call('PEXPIRE', KEYS[2], ttl) end
return 1
"""
)
_CREATE = Script(
    """
local kept = 3
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('HSET', KEYS[1], 'tenant', ARGV[#ARGV - 2], 'source', ARGV[#ARGV - 1])
redis.call('PEXPIRE', KEYS[1], ARGV[#ARGV])
"""
    + _CHANGE
)
_UPDATE = Script(
    """
local kept = 1
local known = redis.call('HMGET', KEYS[1], 'tenant', 'final')
if not known[1] or known[2] then return 0 end
local expected = ARGV[#ARGV]
if expected ~= '' and redis.sha1hex(redis.call('HGET', KEYS[1], 'body')) ~= expected then
    return 0
end
"""
    + _CHANGE
)


class RedisDocuments:
    """A DocumentStore over Redis."""

    def __init__(self, config: StoreConfig) -> None:
        """Connects at the first call. Raises ConfigError when `config.url` is not valid."""
        self._link = RedisLink(config)
        self._prefix = config.key_prefix

    async def create(
        self, document_id: str, *, tenant: str, source: bytes, change: Change, ttl_s: float
    ) -> None:
        arguments = (*_arguments(change), tenant, source, round(ttl_s * 1000))
        call = ScriptCall(_CREATE, self._keys(document_id), arguments)
        await self._link.run(call)

    async def get(self, document_id: str) -> Document | None:
        record, _ = self._keys(document_id)
        fields = ("tenant", "source", "body", "final", "lease_until")
        tenant, source, body, final, lease_until = await self._link.again(
            record, lambda client: client.hmget(record, fields), LARGE_ANSWER_S
        )
        if tenant is None:
            return None
        lost = False
        if final is None:
            lost = int(as_bytes(lease_until)) <= await self._link.now_ms(record)
        return Document(
            tenant=as_bytes(tenant).decode(),
            source=as_bytes(source),
            body=as_bytes(body),
            final=final is not None,
            lost=lost,
        )

    async def update(self, document_id: str, change: Change) -> bool:
        expected = "" if change.expected is None else _digest(change.expected)
        call = ScriptCall(_UPDATE, self._keys(document_id), (*_arguments(change), expected))
        return bool(await self._link.run(call))

    async def events(self, document_id: str, start: int) -> list[bytes]:
        _, log = self._keys(document_id)
        found = await self._link.again(
            log, lambda client: client.lrange(log, start, -1), LARGE_ANSWER_S
        )
        return [as_bytes(event) for event in found]

    async def delete(self, document_id: str) -> None:
        keys = self._keys(document_id)
        await self._link.again(keys[0], lambda client: client.unlink(*keys))

    async def close(self) -> None:
        await self._link.close()

    def _keys(self, document_id: str) -> tuple[bytes, bytes]:
        """Returns the keys of the record, a hash, and of the events, a list."""
        stem = key_of(self._prefix, "document", f"{{{document_id}}}")
        return stem, stem + b":events"


def _digest(body: bytes) -> str:
    """Returns the digest that Redis' scripts can make, too: two bodies of one document differ."""
    return sha1(body, usedforsecurity=False).hexdigest()


def _arguments(change: Change) -> tuple[bytes | str | int, ...]:
    lease_ms = round(change.lease_s * 1000)
    final = "1" if change.final else ""
    return (change.body, change.first_event, lease_ms, final, *change.events)
