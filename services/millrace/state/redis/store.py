"""Keeps the request store in Redis, shared by all services of a fleet.

Every change is one Lua script, which checks that the request still exists and changes it in one
step: Redis' own APPEND and HSET would create a missing key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from redis.asyncio import Redis

from millrace.core.config import StoreConfig
from millrace.core.request import RequestState
from millrace.state.redis.keys import ID_DTYPE, journal_frame, journal_part, request_keys
from millrace.state.redis.link import RedisLink, as_bytes
from millrace.state.redis.scripts import Script, ScriptCall
from millrace.state.store import (
    LEASE_S,
    IdTaken,
    JournalEntry,
    JournalPart,
    RequestRecord,
    StateUpdate,
    check_found,
    check_new_request,
    check_slice,
)

# A record's fields: state, decode_id, kv_tokens, spec, prompt_tokens; `final` once the state is
# final; `kept` until a kept request is released. An expiry of 0 ms deletes.
_CREATE = Script("""
local seen = redis.call('HMGET', KEYS[1], 'state', 'kept')
if seen[1] and (ARGV[6] == '0' or not seen[2]) then return 0 end
if seen[1] then redis.call('UNLINK', KEYS[1], KEYS[2], KEYS[3]) end
redis.call('HSET', KEYS[1], 'state', ARGV[1], 'spec', ARGV[2], 'prompt_tokens', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[5])
redis.call('SET', KEYS[2], ARGV[4], 'PX', ARGV[5])
if ARGV[6] == '1' then redis.call('HSET', KEYS[1], 'kept', '1') end
return 1
""")
# ARGV: ms that a request lives from now on, and a kept one.
_RENEW = Script("""
local seen = redis.call('HMGET', KEYS[1], 'state', 'final', 'kept')
if not seen[1] or seen[2] then return 0 end
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ARGV[seen[3] and 2 or 1]) end
return 1
""")
_SET_STATE = Script("""
local seen = redis.call('HMGET', KEYS[1], 'state', 'final')
if not seen[1] or seen[2] then return 0 end
redis.call('HSET', KEYS[1], 'state', ARGV[1], 'kv_tokens', ARGV[3])
if ARGV[2] ~= '' then redis.call('HSET', KEYS[1], 'decode_id', ARGV[2]) end
return 1
""")
_APPEND = Script("""
local ttl = redis.call('PTTL', KEYS[1])
if ttl < 0 then return 0 end
if redis.call('APPEND', KEYS[2], ARGV[1]) == #ARGV[1] then
  redis.call('PEXPIRE', KEYS[2], ttl)
end
return 1
""")
_RELEASED = """
redis.call('HDEL', KEYS[1], 'kept')
redis.call('DEL', KEYS[2])
redis.call('PEXPIRE', KEYS[1], ARGV[1])
redis.call('PEXPIRE', KEYS[3], ARGV[1])
return 1
"""
_FINISH = Script(
    """
local seen = redis.call('HMGET', KEYS[1], 'state', 'final', 'kept')
if not seen[1] or seen[2] then return 0 end
redis.call('HSET', KEYS[1], 'state', ARGV[2], 'final', '1')
if seen[3] then return 1 end
"""
    + _RELEASED
)
_DELETE = Script("""
if ARGV[1] and redis.call('HGET', KEYS[1], 'spec') ~= ARGV[1] then return 0 end
return redis.call('UNLINK', KEYS[1], KEYS[2], KEYS[3])
""")
_RELEASE = Script("if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end" + _RELEASED)


class RedisStore:
    """A RequestStore over redis-py's asyncio client with a bounded pool of connections."""

    def __init__(self, config: StoreConfig) -> None:
        """Connects at the first call. Raises ConfigError when `config.url` is not valid."""
        self._prefix = config.key_prefix
        self._ttl_ms = round(config.ttl_s * 1000)
        self._lease_ms = min(self._ttl_ms, round(LEASE_S * 1000))
        self._finished_ttl_ms = round(config.finished_ttl_s * 1000)
        self._link = RedisLink(config)

    async def create(
        self,
        request_id: str,
        *,
        spec: bytes,
        prompt_ids: npt.NDArray[np.int32],
        kept: bool = False,
    ) -> None:
        ids = check_new_request(request_id, prompt_ids)
        fields = (RequestState.QUEUED.value, spec, prompt_ids.size, ids, self._lease_ms, int(kept))
        if not await self._link.run_once(self._all(_CREATE, request_id, fields)):
            raise IdTaken(f"request {request_id} is in the store already")

    async def prompt_ids(
        self, request_id: str, start: int = 0, stop: int | None = None
    ) -> npt.NDArray[np.int32]:
        (ids,) = await self._slices(request_id, [(start, stop)])
        return ids

    async def prompt_slices(
        self, request_id: str, slices: Sequence[tuple[int, int]]
    ) -> list[npt.NDArray[np.int32]]:
        return await self._slices(request_id, slices)

    async def _slices(
        self, request_id: str, slices: Sequence[tuple[int, int | None]]
    ) -> list[npt.NDArray[np.int32]]:
        key = request_keys(self._prefix, request_id).prompt
        for start, stop in slices:
            check_slice(request_id, start, stop)

        async def read(client: Redis) -> list[bytes | str | None]:
            # A pipeline forgets its commands when it fails: every attempt needs one of its own.
            pipeline = client.pipeline(transaction=False)
            for start, stop in slices:
                last_byte = -1 if stop is None else stop * ID_DTYPE.itemsize - 1
                pipeline.getrange(key, start * ID_DTYPE.itemsize, last_byte)
            return await pipeline.execute()

        wanted = sum(stop - start for start, stop in slices if stop is not None)
        limit_s = self._link.limit_s(wanted * ID_DTYPE.itemsize)
        results = await self._link.again(key, read, limit_s)
        found = [np.frombuffer(as_bytes(one), dtype=ID_DTYPE).astype(np.int32) for one in results]
        for (start, stop), ids in zip(slices, found, strict=True):
            check_found(request_id, start, stop, ids.size)
        return found

    async def renew(self, request_ids: Sequence[str]) -> None:
        lives = (self._lease_ms, self._ttl_ms)
        await self._link.run_all([self._all(_RENEW, one, lives) for one in request_ids])

    async def set_states(self, updates: Sequence[StateUpdate]) -> None:
        calls = [
            ScriptCall(
                _SET_STATE,
                (request_keys(self._prefix, update.request_id).record,),
                (update.state, update.decode_id, update.kv_tokens),
            )
            for update in updates
        ]
        await self._link.run_all(calls)

    async def append_tokens(self, entries: Sequence[JournalEntry]) -> None:
        calls: list[ScriptCall] = []
        for entry in entries:
            keys = request_keys(self._prefix, entry.request_id)
            frame = journal_frame(entry.choice, entry.start, entry.token_ids)
            calls.append(ScriptCall(_APPEND, (keys.record, keys.journal), (frame,)))
        await self._link.run_all(calls)

    async def journal(self, request_id: str, choice: int) -> npt.NDArray[np.int32]:
        return (await self.journal_after(request_id, choice, known=0, place=0)).token_ids

    async def journal_after(
        self, request_id: str, choice: int, *, known: int, place: int
    ) -> JournalPart:
        key = request_keys(self._prefix, request_id).journal
        found = as_bytes(
            await self._link.again(key, lambda client: client.getrange(key, place, -1))
        )
        return journal_part(found, choice, known=known, place=place)

    async def get(self, request_id: str) -> RequestRecord | None:
        key = request_keys(self._prefix, request_id).record
        fields = ("state", "decode_id", "spec", "prompt_tokens", "kv_tokens")
        state, decode_id, spec, prompt_tokens, kv_tokens = await self._link.again(
            key, lambda client: client.hmget(key, fields)
        )
        if state is None:
            return None
        return RequestRecord(
            request_id=request_id,
            state=as_bytes(state).decode(),
            decode_id=as_bytes(decode_id).decode(),
            spec=as_bytes(spec),
            prompt_tokens=int(as_bytes(prompt_tokens)),
            kv_tokens=int(as_bytes(kv_tokens) or 0),
        )

    async def finish(self, states: Mapping[str, str]) -> None:
        ttl_ms = self._finished_ttl_ms
        ends = [self._all(_FINISH, one, (ttl_ms, state)) for one, state in states.items()]
        await self._link.run_all(ends)

    async def release(self, request_id: str) -> None:
        await self._link.run(self._all(_RELEASE, request_id, (self._finished_ttl_ms,)))

    def _all(
        self, script: Script, request_id: str, arguments: tuple[int | str | bytes, ...]
    ) -> ScriptCall:
        """Returns a call of a script over all keys of a request."""
        keys = request_keys(self._prefix, request_id)
        return ScriptCall(script, (keys.record, keys.prompt, keys.journal), arguments)

    async def delete(self, request_id: str, *, spec: bytes | None = None) -> bool:
        call = self._all(_DELETE, request_id, () if spec is None else (spec,))
        return bool(await self._link.run(call))

    async def ping(self) -> None:
        await self._link.each(lambda client: client.ping())

    async def close(self) -> None:
        await self._link.close()
