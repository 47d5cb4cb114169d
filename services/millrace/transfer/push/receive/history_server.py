"""Returns K/V that landed at a decode instance to the prefill instances that continue the
prompt.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack

from millrace.core.errors import TransferError
from millrace.core.kv.transfer import HandshakeRefused, HistoryAsk
from millrace.transfer.push.receive.admission import Admission
from millrace.transfer.ring.history import Gift, History, HistoryGiver
from millrace.transfer.transport.base import Transport
from millrace.transfer.transport.layout import Side, layer_runs, shared_layers
from millrace.transfer.transport.runs import Runs

log = logging.getLogger(__name__)


class HistoryServer:
    """Sends kept K/V for a ReceiveManager; belongs to its event loop. `on_over` reports the end of
    a gift.
    """

    def __init__(
        self, transport: Transport, region: int, lease_s: float, on_over: Callable[[], None]
    ) -> None:
        """`region` is the pool's."""
        self._transport = transport
        self._region = region
        self._giver = HistoryGiver(transport, lease_s)
        self._on_over = on_over
        self._loop = asyncio.get_running_loop()
        self._gifts: dict[Admission, set[Gift]] = {}

    def give(self, admission: Admission, ask: HistoryAsk, peer: str) -> None:
        """Begins to write the wanted K/V to `peer`; the admission's pages are read until it ends.

        Raises HandshakeRefused when some of it has not landed, or the asker has no place for it.
        """
        request_id = ask.ticket.request_id
        try:
            target = Side.of_runs(ask.layout, ask.pages, ask.runs)
        except ValueError as error:
            raise HandshakeRefused(f"request {request_id}: {error}") from error
        ours, theirs = admission.side.layout.layers, ask.layout.layers
        if shared_layers(ours, theirs) != theirs:
            raise HandshakeRefused(
                f"request {request_id}: {ask.ticket.sender.id} asks for layers "
                f"{theirs.start}..{theirs.stop - 1}, {ours.start}..{ours.stop - 1} lie here"
            )
        wanted = max((run.start_token + run.num_tokens for run in ask.runs), default=0)
        if wanted > admission.prefix_tokens:
            raise HandshakeRefused(
                f"request {request_id}: {ask.ticket.sender.id} asks for the first {wanted} tokens, "
                f"{admission.prefix_tokens} have landed"
            )
        history = History(
            peer=peer,
            runs=_runs(admission.side, target),
            layout=admission.side.layout,
            peer_layout=ask.layout,
            region=self._region,
            peer_region=ask.region,
        )
        try:
            gift = self._giver.give(request_id, ask.ticket.attempt, history)
        except TransferError as error:
            raise HandshakeRefused(str(error)) from error
        self._gifts.setdefault(admission, set()).add(gift)
        listening = ExitStack()
        listening.enter_context(self._transport.listening())  # the asker renews and aborts
        gift.over.add_done_callback(
            lambda _: self._loop.call_soon_threadsafe(self._ended, admission, gift, listening)
        )

    def stop(self, admission: Admission) -> None:
        """Stops gifts that are not wanted any more: posts no more writes; writes in flight must
        end.
        """
        for gift in self._gifts.get(admission, ()):
            gift.stop()

    def reads(self, admission: Admission) -> bool:
        """Returns whether a write may still read the admission's pages."""
        return admission in self._gifts

    def check_integrity(self) -> None:
        """Raises IntegrityError when a gift is in flight: call this when idle."""
        self._giver.check_integrity()

    def _ended(self, admission: Admission, gift: Gift, listening: ExitStack) -> None:
        listening.close()
        if (error := gift.over.exception()) is not None:
            log.warning("%s", error)
        self._gifts[admission].remove(gift)
        if not self._gifts[admission]:
            del self._gifts[admission]
        self._on_over()


def _runs(source: Side, target: Side) -> Runs:
    """Returns the runs of `layer_runs` for all tokens that the target has a place for."""
    return Runs.joined(
        [
            layer_runs(source, target, int(start), int(end - start))
            for start, end in zip(target.starts, target.ends, strict=True)
        ]
    )
