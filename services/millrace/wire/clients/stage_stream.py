"""The first stage's stream to a later stage of its instance, which runs on another host.

It is a stream of threads, not of an event loop: an engine is opened on a thread, and its stages are
commanded by the thread that computes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import grpc

from millrace.version import version
from millrace.wire.channel import open_blocking_channel
from millrace.wire.options import MAX_STAGE_MESSAGE_BYTES
from millrace.wire.pb import stage_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginStage:
    """What a host needs to know before it starts a stage; see stage.proto."""

    instance: str
    model_hash: str
    load_format: str
    place: bytes
    beside: Sequence[str]


class StageStream:
    """Begins a stage at `address` (host:port), and carries its frames. Thread-safe."""

    def __init__(self, address: str, begin: BeginStage) -> None:
        """A host that can't be reached yet is waited for."""
        self.begun = threading.Event()
        """Set when the stage has begun, or has ended without."""
        self._outgoing: SimpleQueue[stage_pb2.ToStage | None] = SimpleQueue()
        message = stage_pb2.BeginStage(
            instance=begin.instance,
            model_hash=begin.model_hash,
            load_format=begin.load_format,
            place=begin.place,
            beside=begin.beside,
            version=version(),
        )
        self._outgoing.put(stage_pb2.ToStage(begin=message))
        self._channel = open_blocking_channel(address, max_message_bytes=MAX_STAGE_MESSAGE_BYTES)
        run_stage = self._channel.stream_stream(
            "/millrace.v1.StageHost/RunStage",
            request_serializer=stage_pb2.ToStage.SerializeToString,
            response_deserializer=stage_pb2.FromStage.FromString,
        )
        self._call = run_stage(self._messages(), wait_for_ready=True)
        self._reader = threading.Thread(target=lambda: None)

    def start(self, on_frame: Callable[[int, bytes], None], on_end: Callable[[str], None]) -> None:
        """Calls `on_frame` with what comes, in order, and at last `on_end` with how the stage has
        ended, on a thread of its own.
        """
        self._reader = threading.Thread(
            target=self._read, args=(on_frame, on_end), name="stage", daemon=True
        )
        self._reader.start()

    def send(self, channel: int, message: bytes) -> None:
        """Sends a frame, or nothing after the end."""
        frame = stage_pb2.StageFrame(channel=channel, message=message)
        self._outgoing.put(stage_pb2.ToStage(frame=frame))

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits for the end. Returns whether it has come."""
        self._reader.join(timeout_s)
        return not self._reader.is_alive()

    def close(self) -> None:
        """Ends the stream, and with it the stage."""
        self._call.cancel()  # type: ignore[no-untyped-call]
        self._outgoing.put(None)
        self._reader.join()
        self._channel.close()

    def _messages(self) -> Iterator[stage_pb2.ToStage]:
        while (message := self._outgoing.get()) is not None:
            yield message

    def _read(self, on_frame: Callable[[int, bytes], None], on_end: Callable[[str], None]) -> None:
        how = "its host closed the stream"
        try:
            for message in self._call:
                match message.WhichOneof("kind"):
                    case "begun":
                        self.begun.set()
                    case "frame":
                        on_frame(message.frame.channel, message.frame.message)
                    case "ended":
                        how = message.ended.how
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)
            how = f"{error.code().name.lower()}: {error.details()}"
        on_end(how)
        self.begun.set()
