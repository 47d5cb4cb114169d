"""Keeps the request store in Redis, shared by all services of a fleet.

Every change is one Lua script, which checks that the request still exists and changes it in one
step: Redis' own APPEND and HSET would create a missing key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError

from millrace.core.config import StoreConfig
from millrace.core.errors import ConfigError
from millrace.core.request import RequestState
from millrace.state.keys import ID_DTYPE, journal_frame, journal_tokens, request_keys
from millrace.state.scripts import Script, ScriptCall, ScriptRunner
from millrace.state.store import (
    JournalEntry,
    RequestRecord,
    StateUpdate,
    StoreError,
    check_found,
    check_new_request,
    check_slice,
)

T = TypeVar("T")

MAX_CONNECTIONS = 64
CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 10.0
RETRY_DELAYS_S = (0.05, 0.25)  # attempts of idempotent calls

# A record's fields: state, decode_id, kv_tokens, spec, prompt_tokens; `final` once the state is
# final.
_CREATE = Script("""
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], 'state', ARGV[1], 'spec', ARGV[2], 'prompt_tokens', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[5])
redis.call('SET', KEYS[2], ARGV[4], 'PX', ARGV[5])
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
_FINISH = Script("""
local seen = redis.call('HMGET', KEYS[1], 'state', 'final')
if not seen[1] or seen[2] then return 0 end
redis.call('HSET', KEYS[1], 'state', ARGV[1], 'final', '1')
redis.call('DEL', KEYS[2])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('PEXPIRE', KEYS[3], ARGV[2])
return 1
""")


def shown_url(url: str) -> str:
    """Returns `url` without user, password and query, for messages and logs."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _bytes(answer: bytes | str | None) -> bytes:
    """Returns the client's answer as bytes: it returns no `str` (`decode_responses` is off)."""
    return answer if isinstance(answer, bytes) else b""


class RedisStore:
    """A RequestStore over redis-py's asyncio client with a bounded pool of connections."""

    def __init__(self, config: StoreConfig) -> None:
        """Connects at the first call. Raises ConfigError when `config.url` is not valid."""
        self._shown_url = shown_url(config.url)
        self._prefix = config.key_prefix
        self._ttl_ms = round(config.ttl_s * 1000)
        self._finished_ttl_ms = round(config.finished_ttl_s * 1000)
        tcp = {} if config.url.startswith("unix:") else {"socket_keepalive": True}
        try:
            pool = BlockingConnectionPool.from_url(
                config.url,
                max_connections=MAX_CONNECTIONS,
                timeout=ANSWER_TIMEOUT_S,
                socket_connect_timeout=CONNECT_TIMEOUT_S,
                socket_timeout=ANSWER_TIMEOUT_S,
                # This class decides which calls are retried, not the library.
                retry=Retry(NoBackoff(), 0),
                protocol=2,
                driver_info=None,
                **tcp,
            )
        except ValueError as error:
            raise ConfigError(
                f"store.url is {self._shown_url!r}; it must be a redis://, rediss:// or unix:// "
                f"URL: {error}"
            ) from error
        self._client: Redis = Redis.from_pool(pool)
        self._scripts = ScriptRunner(self._client)

    async def create(
        self, request_id: str, *, spec: bytes, prompt_ids: npt.NDArray[np.int32]
    ) -> None:
        ids = check_new_request(request_id, prompt_ids)
        keys = request_keys(self._prefix, request_id)
        fields = (RequestState.QUEUED.value, spec, prompt_ids.size, ids, self._ttl_ms)
        call = ScriptCall(_CREATE, (keys.record, keys.prompt), fields)
        (created,) = await self._once(lambda: self._scripts.run([call]))
        if not created:
            raise StoreError(f"request {request_id} is in the store already")

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

        async def read() -> list[bytes | str | None]:
            # A pipeline forgets its commands when it fails: every attempt needs one of its own.
            pipeline = self._client.pipeline(transaction=False)
            for start, stop in slices:
                last_byte = -1 if stop is None else stop * ID_DTYPE.itemsize - 1
                pipeline.getrange(key, start * ID_DTYPE.itemsize, last_byte)
            return await pipeline.execute()

        results = await self._again(read)
        found = [np.frombuffer(_bytes(one), dtype=ID_DTYPE).astype(np.int32) for one in results]
        for (start, stop), ids in zip(slices, found, strict=True):
            check_found(request_id, start, stop, ids.size)
        return found

    async def set_states(self, updates: Sequence[StateUpdate]) -> None:
        calls = [
            ScriptCall(
                _SET_STATE,
                (request_keys(self._prefix, update.request_id).record,),
                (update.state, update.decode_id, update.kv_tokens),
            )
            for update in updates
        ]
        await self._again(lambda: self._scripts.run(calls))

    async def append_tokens(self, entries: Sequence[JournalEntry]) -> None:
        calls: list[ScriptCall] = []
        for entry in entries:
            keys = request_keys(self._prefix, entry.request_id)
            frame = journal_frame(entry.choice, entry.token_ids)
            calls.append(ScriptCall(_APPEND, (keys.record, keys.journal), (frame,)))
        await self._once(lambda: self._scripts.run(calls))

    async def journal(self, request_id: str, choice: int) -> npt.NDArray[np.int32]:
        key = request_keys(self._prefix, request_id).journal
        found = await self._again(lambda: self._client.get(key))
        return journal_tokens(_bytes(found), choice)

    async def get(self, request_id: str) -> RequestRecord | None:
        key = request_keys(self._prefix, request_id).record
        fields = ("state", "decode_id", "spec", "prompt_tokens", "kv_tokens")
        state, decode_id, spec, prompt_tokens, kv_tokens = await self._again(
            lambda: self._client.hmget(key, fields)
        )
        if state is None:
            return None
        return RequestRecord(
            request_id=request_id,
            state=_bytes(state).decode(),
            decode_id=_bytes(decode_id).decode(),
            spec=_bytes(spec),
            prompt_tokens=int(_bytes(prompt_tokens)),
            kv_tokens=int(_bytes(kv_tokens) or 0),
        )

    async def finish(self, request_id: str, state: str) -> None:
        if self._finished_ttl_ms == 0:
            await self.delete(request_id)
            return
        keys = request_keys(self._prefix, request_id)
        call = ScriptCall(
            _FINISH, (keys.record, keys.prompt, keys.journal), (state, self._finished_ttl_ms)
        )
        await self._again(lambda: self._scripts.run([call]))

    async def delete(self, request_id: str) -> None:
        keys = request_keys(self._prefix, request_id)
        await self._again(lambda: self._client.unlink(keys.record, keys.prompt, keys.journal))

    async def ping(self) -> None:
        await self._again(lambda: self._client.ping())

    async def close(self) -> None:
        await self._scripts.close()
        await self._client.aclose()

    async def _again(self, call: Callable[[], Awaitable[T]]) -> T:
        """Makes an idempotent call; tries again when the connection was lost."""
        for delay_s in RETRY_DELAYS_S:
            try:
                return await _cancellable(call())
            except AuthenticationError:  # a kind of RedisConnectionError that stays
                break
            except (RedisConnectionError, OSError):
                await asyncio.sleep(delay_s)
            except RedisError:
                break
        return await self._once(call)

    async def _once(self, call: Callable[[], Awaitable[T]]) -> T:
        """Makes a call that must not be made twice. Raises StoreError when it fails."""
        try:
            return await _cancellable(call())
        except (RedisError, OSError) as error:
            raise StoreError(f"request store {self._shown_url}: {error}") from error


async def _cancellable(work: Awaitable[T]) -> T:
    """Awaits `work`. Raises CancelledError for a cancellation that `work` swallowed.

    The client sends through `asyncio.wait_for`. Before Python 3.12 that function returns its result
    when the task is cancelled in the moment of the result: the task would run on, and whatever it
    waits for next would never be interrupted.
    """
    task = asyncio.current_task()
    assert task is not None  # a coroutine runs in a task
    before = task.cancelling()
    result = await work
    if task.cancelling() > before:
        raise asyncio.CancelledError
    return result
