"""Runs a later stage: of the passes whose rows have come, always the first in the order.

Chunk i + 1 enters a stage as soon as the stage before is done with it (Mnemosyne section 4.3, the
dense schedule). A pass that becomes first preempts the running pass at its next operator, as in the
execution pool (FlowPrefill section 5.1): an urgent pass waits no longer in a later stage than in
the first.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
from torch import Tensor

from millrace.core.errors import MillraceError
from millrace.engine.attention.kvp_owner import RemoteAttention
from millrace.engine.device.publish import LayerPublisher
from millrace.engine.device.run_ahead import Pace, RunAhead
from millrace.engine.forward.passes import Boundary, Fetch, Finish, Passes
from millrace.engine.model.operators import Activations, required
from millrace.engine.pipeline.messages import (
    Answer,
    Command,
    Copied,
    CopyPage,
    Drop,
    Dropped,
    LayerDone,
    LinkReply,
    PassOrder,
    PassStart,
    RingStart,
    Step,
    Stepped,
    Through,
)
from millrace.engine.pipeline.piped_link import PipedLink, PipedRemote, shared_link
from millrace.engine.pipeline.rows import Handed, RowsOut

_LAST: Final = sys.maxsize
_PATIENCE_S: Final = 1.0
"""How long ranks may wait for each other in the middle of a suspended pass."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A pass at this stage: its command and its rows, which come in either order."""

    what: PassStart | RingStart | None = None
    handed: Handed | None = None
    steps: Generator[Boundary] | None = None
    pace: Pace = field(default_factory=Pace)
    may_step: bool = False  # a ring's pass
    has_handed_on: bool = False
    is_unwanted: bool = False  # given up; only its rows are still to come

    @property
    def is_ready(self) -> bool:
        has_rows = self.handed is not None or self.steps is not None
        if isinstance(self.what, RingStart):
            return self.may_step and (has_rows or not len(self.what.task.token_ids))
        return self.what is not None and has_rows


class StageLoop:
    """Computes passes in `run`; `send` and `hand` may be called on any thread.

    On a GPU the host runs a short time ahead, and what is answered is true of the device: a layer
    is reported when the device has written it, and a pass that was dropped writes nothing more.
    """

    def __init__(
        self,
        passes: Passes,
        out: RowsOut,
        answer: Callable[[Answer], None],
        *,
        own_pools: bool = False,
    ) -> None:
        """`out`: to the next stage, or from the last one back to the first. `own_pools`: each stage
        has memory of its own for KV."""
        self._passes = passes
        self._out = out
        self._answer = answer
        self._own_pools = own_pools
        self._device = passes.model.device
        self._run_ahead = RunAhead(self._device)
        self._publisher = LayerPublisher(self._device)
        self._changed = threading.Condition()
        self._entries: dict[int, _Entry] = {}
        self._order: dict[str, int] = {"": -1}
        self._asked: deque[Drop | CopyPage] = deque()  # to be done between two operators
        self._replies: queue.SimpleQueue[LinkReply] = queue.SimpleQueue()
        self._is_notified = False  # a command or rows have come
        self._closing = False
        self._error: MillraceError | None = None

    def __len__(self) -> int:
        """Returns how many passes are at this stage or announced."""
        return len(self._entries)

    def send(self, command: Command) -> None:
        if isinstance(command, LinkReply):
            self._replies.put(command)
            return
        with self._changed:
            match command:
                case PassStart() | RingStart():
                    self._entries.setdefault(command.number, _Entry()).what = command
                case Step():
                    self._entries[command.number].may_step = True
                case PassOrder():
                    self._order = {"": -1} | {name: i for i, name in enumerate(command.names)}
                case Drop() | CopyPage():
                    self._asked.append(command)
            self._notice()

    def hand(self, handed: Handed) -> None:
        """Takes rows that have come."""
        with self._changed:
            entry = self._entries.setdefault(handed.number, _Entry())
            if not entry.is_unwanted:
                entry.handed = handed
                self._notice()
                return
            del self._entries[handed.number]
        handed.take()

    def close(self) -> None:
        """Has `run` return at the next operator."""
        with self._changed:
            self._closing = True
            self._notice()

    def fail(self, error: MillraceError) -> None:
        """Has `run` raise the error at the next operator."""
        with self._changed:
            self._error = self._error or error
            self._notice()

    def _notice(self) -> None:
        self._is_notified = True
        self._changed.notify()

    # -- on the computing thread

    def run(self) -> None:
        """Computes until `close`. Raises the error of a pass or of `fail`: it ends the stage."""
        try:
            while (number := self._await_ready()) is not None:
                self._advance(number)
            for entry in self._entries.values():
                if entry.steps is not None:
                    entry.steps.close()
        finally:
            self._publisher.close()

    def _await_ready(self) -> int | None:
        while True:
            self._do_asked()
            with self._changed:
                if self._closing:
                    return None
                if self._error is not None:
                    raise self._error
                self._is_notified = bool(self._asked)
                if (number := self._first()) is not None:
                    return number
                if self._is_notified or self._changed.wait(_PATIENCE_S):
                    continue
            if self._passes.processes is not None:
                self._passes.processes.rest()
            with self._changed:
                if not self._is_notified:
                    self._changed.wait()

    def _first(self) -> int | None:
        """The first ready pass, by order and number."""
        ready = (
            (self._order.get(entry.what.name, _LAST), number)
            for number, entry in self._entries.items()
            if entry.what is not None and entry.is_ready
        )
        return min(ready, default=(0, None))[1]

    def _advance(self, number: int) -> None:
        """Runs the pass to its end, or until another becomes first."""
        entry = self._entries[number]
        what = entry.what
        assert what is not None  # it is ready
        if isinstance(what, RingStart):
            self._step(what, entry)
            return
        if entry.steps is None:
            entry.steps = self._begin(what, entry)
        for boundary in entry.steps:
            entry.pace.operator = boundary.operator
            self._run_ahead.step(entry.pace, lambda: self._is_notified)
            if what.reports_layers and boundary.operator == "attn":
                self._publisher.together(partial(self._answer, LayerDone(number, boundary.layer)))
            if self._is_notified and not self._goes_on(number):
                return
        self._run_ahead.settle()
        with self._changed:
            del self._entries[number]
        through = self._passes.stage.is_last and what.kv_only
        self._publisher.after_device(partial(self._end, number, through=through))

    def _end(self, number: int, *, through: bool) -> None:
        """Reports the end of a pass that hands nothing on."""
        if through:
            self._answer(Through(number))

    def _step(self, what: RingStart, entry: _Entry) -> None:
        """Runs one operator of a ring's pass."""
        if entry.steps is None:
            entry.steps = self._begin_ring(what, entry)
        boundary = next(entry.steps, None)
        self._settle()
        with self._changed:
            entry.may_step = False
            if boundary is None:
                del self._entries[what.number]
        if boundary is None:
            self._answer(Stepped(what.number, -1, ""))
        else:
            self._answer(Stepped(what.number, boundary.layer, boundary.operator))

    def _begin_ring(self, what: RingStart, entry: _Entry) -> Generator[Boundary]:
        link = PipedLink(
            self._answer,
            self._replies,
            rank=what.task.rank,
            size=what.task.size,
            first_layer=self._passes.model.layers.start,
            settle=self._settle,
        )
        fetch, finish = self._ways(what.number, entry)
        return self._passes.ring(what.task.unpacked(link), fetch=fetch, finish=finish)

    def _goes_on(self, number: int) -> bool:
        with self._changed:
            if self._closing or self._asked:
                return False
            self._is_notified = False
            return self._first() == number

    def _begin(self, what: PassStart, entry: _Entry) -> Generator[Boundary]:
        fetch, finish = self._ways(what.number, entry)
        tables, remote = what.tables.unpacked(), None
        entry.pace = Pace(len(tables.token_ids))
        if tables.remote:
            first, own = self._passes.model.layers.start, self._own_pools
            link = PipedRemote(self._answer, self._replies, first, sends_kv=own)
            shared = shared_link(self._passes, link, own_pools=own)
            remote = RemoteAttention(shared, tables.remote, tables.slots)
        return self._passes.run(
            tables,
            is_cut=what.is_cut,
            kv_only=what.kv_only,
            fetch=fetch,
            finish=finish,
            remote=remote,
        )

    def _ways(self, number: int, entry: _Entry) -> tuple[Fetch, Finish]:
        """Returns how a pass reads its rows, and hands rows on."""

        def fetch(memory: Tensor) -> None:
            handed = entry.handed
            assert handed is not None  # the pass was ready
            memory.copy_(handed.x)
            entry.handed = None
            handed.take()

        def hand_on(state: Activations) -> None:
            self._out.send(number, (state.x, required(state.residual)))
            entry.has_handed_on = True

        return fetch, hand_on

    def _do_asked(self) -> None:
        while self._asked:
            asked = self._asked.popleft()
            answer: Answer
            if isinstance(asked, CopyPage):
                self._passes.copy_page(asked.source, asked.target)
                answer = Copied()
            else:
                answer = Dropped(asked.number, handed_on=not self._drop(asked))
            self._settle()
            self._answer(answer)

    def _settle(self) -> None:
        """Waits until the device has done all that is queued."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _drop(self, drop: Drop) -> bool:
        """Drops a pass. Returns False when the pass was handed on."""
        with self._changed:
            entry = self._entries.pop(drop.number, None)
            if entry is None:
                return False
            if drop.comes and entry.handed is None and entry.steps is None:
                self._entries[drop.number] = _Entry(is_unwanted=True)
        if entry.steps is not None:
            entry.steps.close()
        if entry.handed is not None:  # unread rows
            entry.handed.take()
        return not entry.has_handed_on
