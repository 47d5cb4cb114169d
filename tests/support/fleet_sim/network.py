"""gRPC's place in the simulation: calls whose messages wait until the simulation delivers them.

Services and clients are the real ones, with their protobuf messages; this stands in for the channel
below them. A message is in flight until it is delivered; then it waits at its receiver, who may be
paused. The end of a call travels behind its messages.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import grpc

from support.fleet_sim.kv_network import KvNetwork, KvWire
from support.fleet_sim.processes import Process, current

#: What a stream of the server's messages is called, by its method.
_KINDS = {"StreamTokens": " tokens", "Attach": " attach", "Hold": " hold"}

Method = Callable[[Any, Any], AsyncIterator[Any]]


class End:
    """The end of one direction of a call; with an error for its reader, or without."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


def failure(
    code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, str], ...] = ()
) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), details)


class Wire:
    """One direction of a call."""

    def __init__(self, name: str, reader: Process) -> None:
        self.name = name
        self.reader = reader
        self.flight: deque[Any] = deque()
        self.inbox: deque[Any] = deque()
        self._ended = False
        self._waiting: asyncio.Future[None] | None = None
        self.on_end: Callable[[], None] = lambda: None

    def send(self, message: Any) -> None:
        if not self._ended:
            self.flight.append(message)

    def end(self, error: BaseException | None = None, *, lost: bool = False) -> None:
        """Ends it after the messages in flight, which may be `lost`, with an end among them."""
        if lost:
            self._ended = self._ended and not self.flight
            self.flight.clear()
        if not self._ended:
            self._ended = True
            self.flight.append(End(error))

    def deliver(self, most: int) -> None:
        while self.flight and most:
            most -= 1
            message = self.flight.popleft()
            self.inbox.append(message)
            if isinstance(message, End):
                self.on_end()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def get(self) -> Any:
        """Returns the next message. Raises StopAsyncIteration or the error at the end."""
        while not self.inbox:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        message = self.inbox[0]
        if not isinstance(message, End):
            return self.inbox.popleft()
        if message.error is not None:
            raise message.error
        raise StopAsyncIteration


class Aborted(Exception):
    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        super().__init__(str(error))
        self.error = error


class ServerContext:
    def __init__(self, until_s: float | None = None) -> None:
        self._until_s = until_s
        self._metadata: tuple[tuple[str, str], ...] = ()

    def time_remaining(self) -> float | None:
        return None if self._until_s is None else self._until_s - time.monotonic()

    def set_trailing_metadata(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self._metadata = metadata

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        raise Aborted(failure(code, details, self._metadata))


class Requests:
    """The messages of a client, as the servicer reads them."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def __aiter__(self) -> Requests:
        return self

    async def __anext__(self) -> Any:
        return await self._wire.get()


class Call:
    """A call from one process to another, with both directions."""

    def __init__(self, network: Network, client: Process, server: Process, kind: str) -> None:
        self.client, self.server = client, server
        self.up = Wire(f"{client.name}>{server.name}{kind}", server)
        self.down = Wire(f"{server.name}>{client.name}{kind}", client)
        self._network = network
        self._tasks: list[asyncio.Task[Any]] = []
        self.over = False
        self._older: Call | None = None  # a connection keeps the order of calls

    def open(
        self, method: Method, requests: Any, *, streams: bool | None, ends: bool = True
    ) -> None:
        """`streams`: the client sends messages; None: it has sent one. Without `ends` the server
        tells of no end: its one message is that.
        """
        asked: Any = requests if streams is False else Requests(self.up)
        handling = self.server.context.copy().run(
            self.server.loop.create_task, self._handle(method, asked, ends=ends)
        )
        if streams:
            self._tasks.append(self.client.loop.create_task(self._pump(requests)))
        self.up.on_end = lambda: None if self.up.inbox[-1].error is None else handling.cancel()
        self._handling = handling

    def come_after(self, older: Call) -> None:
        """Is heard after all that the client has said in an older call."""
        self._older = older

    @property
    def is_next(self) -> bool:
        """Whether the server may hear of it now."""
        if self._older is not None and not (self._older.up.flight and not self._older.is_void):
            self._older = None
        return self._older is None

    @property
    def is_void(self) -> bool:
        """Whether nobody will hear of it."""
        return self.server.has_lost or not self.server.alive

    async def ask(self, method: Any, request: Any, timeout_s: float | None) -> Any:
        """Makes a call with one request and one reply."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s

        async def reply(requests: Requests, _: ServerContext) -> AsyncIterator[Any]:
            yield await method(await anext(requests), ServerContext(until_s))

        self.up.send(request)
        self.open(reply, None, streams=None, ends=False)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self.down.get()
        except TimeoutError:
            self.cancel()
            raise failure(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time") from None
        except asyncio.CancelledError:
            self.cancel()
            raise
        except grpc.aio.AioRpcError:
            self._network.forget(self)
            raise
        self._network.forget(self)
        return answer

    async def _handle(self, method: Method, requests: Any, *, ends: bool) -> None:
        try:
            async for message in method(requests, ServerContext()):
                self.down.send(message)
            if ends:
                self.down.end()
        except Aborted as aborted:
            self.down.end(aborted.error)
        except asyncio.CancelledError:
            self.down.end(failure(grpc.StatusCode.CANCELLED, "cancelled"))
            raise
        except Exception as error:
            self.server.failure = self.server.failure or error
            self.down.end(failure(grpc.StatusCode.UNKNOWN, repr(error)))

    async def _pump(self, requests: AsyncIterator[Any]) -> None:
        async for message in requests:
            self.up.send(message)
        self.up.end()

    # ---- the client's end

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> Any:
        message = await self.down.get()
        self.client.epoch_read = getattr(message, "epoch", 0)
        return message

    async def read(self) -> Any:
        try:
            return await self.down.get()
        except StopAsyncIteration:
            return grpc.aio.EOF

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK

    def cancel(self) -> None:
        """Ends the call: the server hears of it later."""
        for task in self._tasks:
            task.cancel()
        self._network.forget(self)
        self.up.end(failure(grpc.StatusCode.CANCELLED, "cancelled"), lost=False)
        if self.client.has_lost:
            self.up.deliver(0)

    # ---- what may happen to it

    def break_(self) -> None:
        """The connection is lost with all that is in flight; both ends hear of it later."""
        lost = failure(grpc.StatusCode.UNAVAILABLE, "the connection was lost")
        self.up.end(lost, lost=True)
        self.down.end(lost, lost=True)
        self.over = True

    def lose(self, dead: Process) -> None:
        """One end is dead: what it has sent still comes."""
        lost = failure(grpc.StatusCode.UNAVAILABLE, f"{dead.name} is gone")
        self.up.end(lost, lost=dead is self.server)
        self.down.end(lost, lost=dead is self.client)
        self.over = True


class Channel:
    """Stands in for a grpc.aio.Channel to one address."""

    def __init__(self, network: Network, address: str) -> None:
        self._network = network
        self._address = address

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *error: object) -> None:
        return

    def stream_stream(self, path: str, **codecs: object) -> Callable[..., Any]:
        return lambda requests, **_: self._network.call(self._address, path, requests, streams=True)

    def unary_stream(self, path: str, **codecs: object) -> Callable[..., Any]:
        def ask(request: Any, wait_for_ready: bool = False, **_: object) -> Any:
            if wait_for_ready:
                return Waiting(self._network, self._address, path, request)
            return self._network.call(self._address, path, request, streams=False)

        return ask

    def unary_unary(self, path: str, **codecs: object) -> Callable[..., Any]:
        def ask(request: Any, timeout: float | None = None) -> Any:
            return self._network.ask(self._address, path, request, timeout)

        return ask

    def stream_unary(self, path: str, **codecs: object) -> None:
        """Nothing in the simulation makes such calls."""


class Refused:
    """A call to an address where no process listens."""

    def __aiter__(self) -> Refused:
        return self

    async def __anext__(self) -> Any:
        raise failure(grpc.StatusCode.UNAVAILABLE, "nobody listens")

    read = __anext__

    def cancel(self) -> None:
        pass


class Waiting:
    """A call that waits for its server (wait_for_ready)."""

    def __init__(self, network: Network, address: str, path: str, request: Any) -> None:
        self._network, self._address, self._path = network, address, path
        self._request = request
        self._call: Any = None

    def __aiter__(self) -> Waiting:
        return self

    async def __anext__(self) -> Any:
        if self._call is None:
            while self._address not in self._network.servers:
                await self._network.someone_listens()
            self._call = self._network.connect(self._address, self._path, self._request, False)
        return await self._call.__anext__()

    def cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()


class Network:
    """All calls, and the processes that listen, by address."""

    def __init__(self) -> None:
        self.servers: dict[str, tuple[Process, dict[str, Method]]] = {}
        self.calls: list[Call] = []
        self.kv = KvNetwork()
        self._asked: dict[tuple[Process, Process], Call] = {}  # the last call with one reply
        self._arrivals: list[asyncio.Future[None]] = []

    def open_channel(self, address: str, **options: object) -> Channel:
        return Channel(self, address)

    def listen(self, address: str, process: Process, methods: dict[str, Method]) -> None:
        self.servers[address] = process, methods
        arrivals, self._arrivals = self._arrivals, []
        for one in arrivals:
            if not one.done():
                one.set_result(None)

    async def someone_listens(self) -> None:
        one = asyncio.get_running_loop().create_future()
        self._arrivals.append(one)
        await one

    def call(self, address: str, path: str, requests: Any, *, streams: bool) -> Any:
        if address not in self.servers:
            return Refused()
        return self.connect(address, path, requests, streams)

    def connect(self, address: str, path: str, requests: Any, streams: bool) -> Call:
        client = current()
        server, methods = self.servers[address]
        assert client is not None
        call = Call(self, client, server, "" if streams else _KINDS[path.rpartition("/")[2]])
        self.calls.append(call)
        method = methods[path.rpartition("/")[2]]
        if not streams and not path.endswith("/StreamTokens"):  # the request takes its time
            call.up.send(requests)
            call.open(partial(_after_the_request, method), None, streams=None, ends=True)
        else:
            call.open(method, requests, streams=streams)
        return call

    async def ask(self, address: str, path: str, request: Any, timeout_s: float | None) -> Any:
        """Makes a call of one request and one reply. Raises grpc.aio.AioRpcError."""
        if address not in self.servers:
            raise failure(grpc.StatusCode.UNAVAILABLE, "nobody listens")
        client = current()
        server, methods = self.servers[address]
        assert client is not None
        name = path.rpartition("/")[2]
        call = Call(self, client, server, f" {name}")
        pair = client, server
        if (older := self._asked.get(pair)) is not None:
            call.come_after(older)
        self._asked[pair] = call
        self.calls.append(call)
        return await call.ask(methods[name], request, timeout_s)

    def forget(self, call: Call) -> None:
        call.over = True

    def close(self, process: Process) -> None:
        """A process is dead: it listens no more, and its calls end."""
        for address, (server, _) in list(self.servers.items()):
            if server is process:
                del self.servers[address]
        self.kv.close(process)
        for call in self.calls:
            if not call.over and process in (call.client, call.server):
                call.lose(process)

    def wires(self) -> list[Wire | KvWire]:
        """Returns the wires with messages in flight to living processes."""
        found: list[Wire | KvWire] = [*self.kv.wires()]
        gone = False
        for call in self.calls:
            for wire in (call.up, call.down):
                is_heard = wire.flight and wire.reader.alive and not wire.reader.has_lost
                if is_heard and (wire is call.down or call.is_next):
                    found.append(wire)
            gone = gone or call.over
        if gone:
            self.calls = [one for one in self.calls if not (one.over and _is_empty(one))]
        return found


async def _after_the_request(
    method: Method, requests: Requests, context: ServerContext
) -> AsyncIterator[Any]:
    async for message in method(await anext(requests), context):
        yield message


def _is_empty(call: Call) -> bool:
    return not any(
        wire.flight and wire.reader.alive and not wire.reader.has_lost
        for wire in (call.up, call.down)
    )
