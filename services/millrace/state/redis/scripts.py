"""Runs Lua scripts on Redis, with the calls of many callers in one round trip.

A round trip costs the client some 100 us of CPU, independent of its size: calls made during a round
trip wait for its end and go together in the next.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hiredis import pack_command
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import NoScriptError, ResponseError

from millrace.concurrency import Patience

#: Bytes above which a group of calls travels alone, so that small groups don't wait for it.
LARGE_BYTES = 256 << 10
MAX_BATCH_CALLS = 1024
_ASKING = pack_command(("ASKING",))

#: Begins scripts that read the server's clock: `now_ms()` returns it.
NOW_MS = """
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
"""


class Script:
    """A Lua script and its name at Redis."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


class ScriptCall:
    """One run of a script, which returns a number or a list of numbers."""

    __slots__ = ("arguments", "keys", "script", "size_bytes")

    def __init__(
        self, script: Script, keys: Sequence[bytes], arguments: Sequence[bytes | str | int]
    ) -> None:
        self.script = script
        self.keys = keys
        self.arguments = arguments
        #: The bytes of its large arguments.
        self.size_bytes = sum([len(one) for one in arguments if isinstance(one, bytes)])


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    calls: Sequence[ScriptCall]
    done: asyncio.Future[list[Any]]


class ScriptRunner:
    """Runs scripts in the order of the calls (except large groups)."""

    def __init__(
        self, client: Redis, limit_s: Callable[[int], float], *, asking: bool = False
    ) -> None:
        """`limit_s` returns how long a round trip of so many bytes may take. `asking`: every call
        follows an ASKING, for a server of a cluster that does not have the keys yet.
        """
        self._client = client
        self._asking = asking
        self._limit_s = limit_s
        self._waiting: list[_Group] = []
        self._sender: asyncio.Task[None] | None = None

    async def run(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """Returns the answers, in order. Raises redis' error of the first call that failed, and
        TimeoutError.

        If the caller is cancelled, its calls may still run, unless they wait for a round trip.
        """
        if not calls:
            return []
        if bytes_of(calls) > LARGE_BYTES:
            return _numbers(await self._evaluate(calls))
        group = _Group(calls, asyncio.get_running_loop().create_future())
        self._waiting.append(group)
        if self._sender is None:
            self._sender = asyncio.create_task(self._send())
        return await group.done

    async def close(self) -> None:
        """Returns when no call is in flight any more."""
        if self._sender is not None:
            await self._sender

    async def _send(self) -> None:
        try:
            while self._waiting:
                await self._round_trip(self._next_batch())
        finally:
            self._sender = None

    def _next_batch(self) -> list[_Group]:
        self._waiting = [group for group in self._waiting if not group.done.done()]
        taken = calls = 0
        while taken < len(self._waiting) and calls < MAX_BATCH_CALLS:
            calls += len(self._waiting[taken].calls)
            taken += 1
        batch, self._waiting = self._waiting[:taken], self._waiting[taken:]
        return batch

    async def _round_trip(self, batch: Sequence[_Group]) -> None:
        """Settles every group of `batch`."""
        try:
            answers = await self._evaluate([call for group in batch for call in group.calls])
        except asyncio.CancelledError:  # the loop shuts down
            for group in (*batch, *self._waiting):
                group.done.cancel()
            raise
        except Exception as error:
            for group in batch:
                if not group.done.done():
                    group.done.set_exception(error)
            return
        position = 0
        for group in batch:
            own = answers[position : position + len(group.calls)]
            position += len(group.calls)
            if group.done.done():  # its caller was cancelled
                continue
            try:
                group.done.set_result(_numbers(own))
            except Exception as error:
                group.done.set_exception(error)

    async def _evaluate(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """Makes one round trip; two more when the server does not know a script yet."""
        async with Patience(self._limit_s(bytes_of(calls))):
            return await self._answers(calls)

    async def _answers(self, calls: Sequence[ScriptCall]) -> list[Any]:
        answers = await self._pipeline(calls)
        unknown = [i for i, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if unknown:
            for source in {calls[i].script.source for i in unknown}:
                await self._client.script_load(source)
            again = await self._pipeline([calls[i] for i in unknown])
            for i, answer in zip(unknown, again, strict=True):
                answers[i] = answer
        return answers

    async def _pipeline(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """Sends the calls together, and returns their answers and ResponseErrors, in order.

        The library's own pipeline does the same for several times the CPU: it packs in Python, and
        each of its reads has a time limit of its own.
        """
        pool = self._client.connection_pool
        connection = await pool.get_connection()
        try:
            pieces: list[bytes] = []
            for call in calls:
                if self._asking:
                    pieces.append(_ASKING)
                pieces += _packed(call, connection)
            await connection.send_packed_command(pieces)
            if self._asking:
                return [await _answer(connection) for _ in calls for _ in range(2)][1::2]
            return [await _answer(connection) for _ in calls]
        finally:
            await pool.release(connection)


def _packed(call: ScriptCall, connection: AbstractConnection) -> Sequence[bytes]:
    """Returns the pieces of a command."""
    script, keys = call.script, call.keys
    parts: tuple[Any, ...] = ("EVALSHA", script.sha, len(keys), *keys, *call.arguments)
    if call.size_bytes > LARGE_BYTES:
        return connection.pack_command(*parts)  # slow, but it copies no large argument
    return (pack_command(parts),)


async def _answer(connection: AbstractConnection) -> Any:  # noqa: ANN401 - of any script
    """Reads an answer, for as long as the caller waits."""
    try:
        return await connection.read_response(timeout=math.inf)
    except ResponseError as error:
        return error


def bytes_of(calls: Sequence[ScriptCall]) -> int:
    """Returns the bytes of the calls' large arguments."""
    return sum([call.size_bytes for call in calls])


def _numbers(answers: Sequence[Any]) -> list[Any]:
    """Raises the first error among the answers."""
    numbers: list[Any] = []
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
        numbers.append(answer)
    return numbers
