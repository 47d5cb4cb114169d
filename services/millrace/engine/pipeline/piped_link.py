"""Links as a later stage has them: the real links are at the first stage, over the pipe.

While the stage runs an operator that needs a link, the first stage's computing thread waits for the
stage and makes the calls meanwhile.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from millrace.core.kv.kvp_pass import RemoteRows
from millrace.engine.attention.kvp_owner import Partial, RemoteLink
from millrace.engine.forward.passes import Passes
from millrace.engine.parallel.links.kvp import NewRowsRemote
from millrace.engine.pipeline.messages import LinkCall, LinkReply, Packed, RemoteCall


class PipedLink:
    """A `RingLink`. Each call is made at the first stage, which waits for the stage's step."""

    def __init__(
        self,
        call: Callable[[LinkCall], None],
        replies: queue.SimpleQueue[LinkReply],
        *,
        rank: int,
        size: int,
        first_layer: int,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """`first_layer`: of the stage, as the model counts. `settle` waits for the stage's device,
        before the first stage does what follows the device's work."""
        self._call = call
        self._settle = settle
        self._replies = replies
        self._first_layer = first_layer
        self.rank = rank
        self.size = size

    def history(self, layer: int) -> bool:
        return self._make("history", self._first_layer + layer)

    def publish(self, layer: int) -> None:
        self._settle()
        self._make("publish", self._first_layer + layer)

    def wait(self, step: int) -> bool:
        return self._make("wait", step)

    def release(self, step: int) -> None:
        self._settle()
        self._make("release", step)

    def _make(self, method: str, argument: int) -> bool:
        self._call(LinkCall(method, argument))
        return bool(self._replies.get().value)


class PipedRemote:
    """A `RemoteLink`, of a pass that the first stage has begun and ends."""

    def __init__(
        self,
        call: Callable[[RemoteCall], None],
        replies: queue.SimpleQueue[LinkReply],
        first_layer: int,
        *,
        sends_kv: bool = False,
    ) -> None:
        """`sends_kv`: the first stage can't read the stage's pool, and gets what it would read."""
        self._call = call
        self._replies = replies
        self._first_layer = first_layer
        self._sends_kv = sends_kv

    def begin(self, rows: Sequence[RemoteRows], slots: Tensor) -> None:
        """Does nothing: the first stage has begun the pass."""

    def send(self, layer: int, q_nhd: Tensor, kv_layers: Tensor) -> None:
        kv = Packed.of(kv_layers) if self._sends_kv else None
        self._call(RemoteCall(self._first_layer + layer, Packed.of(q_nhd), kv))
        self._replies.get()

    def partials(self, layer: int) -> Iterator[Partial]:
        self._call(RemoteCall(self._first_layer + layer, None))
        found = self._replies.get().value
        assert isinstance(found, tuple)  # what the call asks for
        return (part.partial() for part in found)

    def end(self) -> Mapping[RemoteRows, str]:
        return {}


def shared_link(passes: Passes, link: RemoteLink, *, own_pools: bool) -> RemoteLink:
    """Returns the link as the passes of a stage take it. `own_pools`: each stage has memory of its
    own, so that all stages' links get the K/V of new rows alone."""
    if own_pools and passes.processes is None:
        return NewRowsRemote(link)
    return passes.shared(link)
