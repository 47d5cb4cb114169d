"""A later stage on another host, as the first stage commands and watches it."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing import Pipe

from millrace.instance.stages.remote.codec import encode
from millrace.instance.stages.remote.relay import Frame, Relay
from millrace.instance.stages.stage_process import StagePlace
from millrace.wire.clients.stage_stream import BeginStage, StageStream


class RemoteStage:
    """A `LaterStage` at `millrace stage` on another host; it ends with its stream."""

    def __init__(
        self, address: str, model: tuple[str, str], place: StagePlace, beside: Sequence[str]
    ) -> None:
        """Begins the stage, once its host can be reached; `has_begun` waits for it.

        `model`: its hash and load format. `beside`: the names of what each rank is to serve beside
        its passes.
        """
        self.where = f" at {address}"
        self._ending = ""
        self.pipe, theirs = Pipe()
        pairs = {name: [Pipe() for _ in place.devices] for name in beside}
        self.besides = {name: [pipe for pipe, _ in of_ranks] for name, of_ranks in pairs.items()}
        ends = [end for of_ranks in pairs.values() for _, end in of_ranks]
        begin = BeginStage(
            instance=place.name.rpartition("-")[0],
            model_hash=model[0],
            load_format=model[1],
            place=encode(place),
            beside=tuple(beside),
        )
        self._stream = StageStream(address, begin)
        self._relay = Relay([theirs, *ends], self._send)
        self._stream.start(self._came, self._ended)

    def has_begun(self, timeout_s: float) -> bool:
        """Waits until the stage has begun, or has failed to. Returns whether either has come."""
        return self._stream.begun.wait(timeout_s)

    def ending(self, timeout_s: float) -> str:
        """`LaterStage.ending`."""
        self._stream.join(timeout_s)
        return self._ending

    def close(self) -> None:
        """`LaterStage.close`."""
        self._stream.close()
        self._relay.close()

    def _send(self, frame: Frame) -> None:
        self._stream.send(*frame)

    def _came(self, channel: int, message: bytes) -> None:
        self._relay.receive(Frame(channel, message))

    def _ended(self, how: str) -> None:
        self._ending = how
        self._relay.end()
