"""The passes in flight: begun at the first stage, computed by later stages as well.

The computing thread begins passes and waits for them; other threads bring the stages' answers.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final, Protocol

from torch import Tensor

from millrace.core.errors import IntegrityError, TransferError
from millrace.engine.completion import Completion
from millrace.engine.errors import EngineDied
from millrace.engine.pipeline.messages import (
    Answer,
    Command,
    Copied,
    CopyPage,
    Drop,
    Dropped,
    LayerDone,
    LinkCall,
    PassOrder,
    RemoteCall,
    Stepped,
    Through,
)
from millrace.engine.pipeline.rows import Handed

_ANSWER_TIMEOUT_S: Final = 60.0
_LAST_ANSWERS_S: Final = 1.0
_NEWS_S: Final = 5.0  # for a stage's end to be read, on a busy machine

Call = LinkCall | RemoteCall | Stepped
"""What a later stage sends while the first stage's computing thread waits for the stage."""


class StageError(EngineDied):
    """A stage has died, and the instance ends; the message names the stage."""


class LaterStages(Protocol):
    """Sends commands to the later stages, whose answers go to `PipelineRunner.in_flight`."""

    @property
    def count(self) -> int:
        """Returns the number of later stages."""

    def send(self, command: Command, stage: int | None = None) -> None:
        """Sends the command to one stage, counted from 0, or to all.

        Raises StageError when one has died.
        """

    def close(self) -> None:
        """Ends the later stages."""


@dataclass(slots=True, eq=False)
class PassInFlight:
    """A pass that has begun, and the reports of later stages for its caller."""

    number: int
    name: str
    on_layer: Callable[[int], None]
    next_layer: int  # to tell the caller of
    to_come: int  # answers: one for each later layer, and one for the end
    done: set[int] = field(default_factory=set)  # layers that wait for a layer before them
    through: Completion = field(default_factory=Completion)
    rows: Tensor | None = None  # that the last stage handed back
    handed_on: bool = False  # by the first stage
    is_served: bool = False  # the computing thread waits in `InFlight.next_call`
    is_wanted: bool = True  # a caller waits for its end

    def next_layers(self, done: int) -> Iterator[int]:
        """Yields the layers to tell now that one more is done. (Those of a stage on another host
        may come before those of an earlier stage.)"""
        self.done.add(done)
        while self.next_layer in self.done:
            self.done.remove(self.next_layer)
            yield self.next_layer
            self.next_layer += 1


class InFlight:
    """The table of the passes in flight."""

    def __init__(self, stages: LaterStages) -> None:
        self._stages = stages
        self._numbers = count()
        self._passes: dict[int, PassInFlight] = {}
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._calls: queue.SimpleQueue[Call | PassInFlight | None] = queue.SimpleQueue()
        self._asked: Completion | None = None
        self._answer: Dropped | Copied | None = None
        self._failure: StageError | None = None
        self._failed = threading.Event()
        self._on_death: Callable[[EngineDied], None] = lambda error: None

    def __len__(self) -> int:
        """Returns the number of passes in the pipeline."""
        with self._lock:
            return len(self._passes)

    def when_died(self, call: Callable[[EngineDied], None]) -> None:
        """Has `call` made once a stage has died: at once if one has, else on another thread."""
        with self._lock:
            self._on_death = call
            failure = self._failure
        if failure is not None:
            call(failure)

    def check_integrity(self) -> None:
        """Raises IntegrityError when passes are left.

        Waits up to a second for answers that are on their way.
        """
        deadline_s = time.monotonic() + _LAST_ANSWERS_S
        while len(self) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        with self._lock:
            if self._passes:
                raise IntegrityError(f"passes {sorted(self._passes)} are left in later stages")

    # -- for the computing thread

    def begin(
        self,
        name: str,
        on_layer: Callable[[int], None] = lambda layer: None,
        layers: range = range(0),
    ) -> PassInFlight:
        """Enters a pass.

        `layers`: those of later stages that are to report before the pass is through.
        """
        entry = PassInFlight(next(self._numbers), name, on_layer, layers.start, 1 + len(layers))
        with self._lock:
            self._passes[entry.number] = entry
        return entry

    def send(self, command: Command, stage: int | None = None) -> None:
        """Sends a command. Raises StageError when a stage has died."""
        if self._failure is not None:
            raise self._failure
        self._stages.send(command, stage)

    def wait(self, entry: PassInFlight, timeout_s: float) -> None:
        """Returns when the pass is through. Raises StageError when a stage has died, or no pass
        ends within `timeout_s`."""
        if not entry.through.wait(timeout_s):
            raise StageError(f"no later stage has ended a pass for {timeout_s:g} s")
        if self._failure is not None:
            raise self._failure

    def next_call(self, timeout_s: float | None = None) -> Call | PassInFlight:
        """Returns the next call of a stage or its report of a step, or a pass that `is_served` and
        is through.

        Raises StageError as `wait` does.
        """
        try:
            call = self._calls.get(timeout=timeout_s)
        except queue.Empty:
            raise StageError(f"no later stage has ended a pass for {timeout_s:g} s") from None
        if call is None or self._failure is not None:
            raise self._failure or StageError("a stage died")
        return call

    def ending(self, error: TransferError) -> StageError:
        """Returns why no stage takes rows, which were sent in vain: mostly one has died, which is
        known a moment later."""
        if self._failed.wait(_NEWS_S) and self._failure is not None:
            return self._failure
        return StageError(f"rows can't be handed on: {error}")

    def leave(self, entry: PassInFlight) -> None:
        """Notes that no caller waits for the pass, which continues through the later stages."""
        with self._lock:
            entry.is_wanted = False
            if not entry.to_come:
                self._passes.pop(entry.number, None)

    def end(self, entry: PassInFlight) -> None:
        """Removes a pass that is through, and whose rows were read."""
        with self._lock:
            self._passes.pop(entry.number, None)

    def order(self, names: Sequence[str]) -> None:
        """Sets the order of passes in the later stages, by the names of their tasks. Raises
        StageError when a stage has died."""
        self.send(PassOrder(tuple(names)))

    def drop(self, names: Sequence[str]) -> None:
        """Gives up all passes of these names. Returns when none of them writes KV any more."""
        with self._lock:
            found = [entry for entry in self._passes.values() if entry.name in names]
        for entry in found:
            self.give_up(entry)

    def give_up(self, entry: PassInFlight) -> None:
        """Drops the pass where it is. Returns when no stage writes its KV any more."""
        with self._lock:
            known = self._passes.pop(entry.number, None)
        if known is None or entry.rows is not None or self._failure is not None:
            return
        comes = entry.handed_on
        for stage in range(self._stages.count):
            if self._drop(entry.number, stage, comes=comes):
                comes = False  # later stages will never see it
        # A pass that had left the last stage comes back, and `hand` takes its rows.

    def copy_page(self, source: int, target: int) -> None:
        """Has every later stage copy a page of its own pool. Returns when all have: later passes
        find the copy, and the target may be freed."""
        for stage in range(self._stages.count):
            self._ask(CopyPage(source, target), stage, "copied a page")

    def _drop(self, number: int, stage: int, *, comes: bool) -> bool:
        """Has the stage drop the pass. Returns whether the stage had the pass."""
        answer = self._ask(Drop(number, comes), stage, "dropped a pass")
        return isinstance(answer, Dropped) and not answer.handed_on

    def _ask(self, command: Command, stage: int, done: str) -> Dropped | Copied | None:
        """Returns the stage's answer, which comes within an operator of the stage."""
        with self._asking:
            with self._lock:
                waiter = self._asked = Completion()
            self.send(command, stage)
            if not waiter.wait(_ANSWER_TIMEOUT_S):
                raise StageError(f"stage {stage + 1} has not {done} for {_ANSWER_TIMEOUT_S:g} s")
            if self._failure is not None:
                raise self._failure
            return self._answer

    # -- for other threads

    def receive(self, answer: Answer) -> None:
        """Takes an answer in. Answers that earlier stages sent before this one come first."""
        match answer:
            case LayerDone():
                with self._lock:
                    entry = self._passes.get(answer.number)
                if entry is not None:
                    for layer in entry.next_layers(answer.layer):
                        entry.on_layer(layer)
                        self._came(answer.number)
            case Through():
                self._came(answer.number)
            case LinkCall() | RemoteCall() | Stepped():
                self._calls.put(answer)
            case Dropped() | Copied():
                with self._lock:
                    self._answer, waiter = answer, self._asked
                if waiter is not None:
                    waiter.set()

    def hand(self, handed: Handed) -> None:
        """Takes the rows of a pass that the last stage has handed back. Copies the rows at once:
        the caller may compute other passes first, for which the last stage must not wait."""
        with self._lock:
            entry = self._passes.get(handed.number)
        if entry is not None and entry.is_wanted:
            entry.rows = handed.x.clone()
        handed.take()
        self._came(handed.number)

    def fail(self, error: StageError) -> None:
        """Ends everything after a stage has died: every call that waits, and every later one,
        raises the error."""
        with self._lock:
            self._failure = self._failure or error
            self._failed.set()
            on_death = self._on_death
            waiters = [entry.through for entry in self._passes.values()]
            if self._asked is not None:
                waiters.append(self._asked)
        self._calls.put(None)
        on_death(error)
        for waiter in waiters:
            waiter.set()

    def _came(self, number: int) -> None:
        """Counts an answer of a pass. Rows and answers travel separately: either may be last."""
        with self._lock:
            entry = self._passes.get(number)
            if entry is None:
                return
            entry.to_come -= 1
            if entry.to_come:
                return
            if not entry.is_wanted:
                del self._passes[number]
        entry.through.set()
        if entry.is_served:
            self._calls.put(entry)
