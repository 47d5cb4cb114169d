"""Passes that all ranks of a group run together: rank 0 leads, the others mirror it.

Rank 0 leads by what its caller does: where it goes on with a pass, the others were told to run it,
and run ahead of it as far as their collectives let them. Where the caller turns to something else,
all stop at an operator that none has begun (`StopCounter`) and rank 0 runs up to it too; what it
ran so without being asked is yielded when the caller comes back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count

from torch import Tensor

from millrace.core.errors import IntegrityError
from millrace.engine.forward.passes import Boundary
from millrace.engine.parallel.commands import Begin, Command, Order, Project, Run
from millrace.engine.parallel.rank_group import RankError, RankGroup


def _is_free(operator: int) -> bool:
    return False


@dataclass(slots=True, eq=False)
class _Pass:
    number: int
    steps: Iterator[Boundary]
    begin: Callable[[], Begin]  # what the others need to begin it
    is_led: Callable[[int], bool]
    operators: int = 0  # that rank 0 has run
    ahead: deque[Boundary] = field(default_factory=deque)  # to be yielded
    attn: Boundary | None = None  # behind rank 0, and perhaps not yet behind the others
    told: bool = False  # the others have begun it
    over: bool = False

    def reach(self, boundary: Boundary) -> None:
        """Rank 0 has come to a boundary. The all-reduce of o_proj shows that attn is behind all."""
        if boundary.operator == "attn":
            self.attn = boundary
            return
        if self.attn is not None:
            self.ahead.append(self.attn)
            self.attn = None
        self.ahead.append(boundary)


class Lockstep:
    """Rank 0's side of it. One thread at a time uses it.

    RankError, from whichever call meets it, ends the group.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._operators = 0  # of the last command, behind rank 0
        self._running: _Pass | None = None  # that all ranks are in the middle of
        self._dropped: list[int] = []
        self._numbers = count()

    def run(
        self,
        steps: Iterator[Boundary],
        begin: Callable[[], Begin],
        is_led: Callable[[int], bool] = _is_free,
    ) -> Generator[Boundary]:
        """Rank 0's `steps` of a pass, with all other ranks at theirs.

        Suspended where it is left, by whatever is called next. The KV of a layer is in the pages of
        all ranks once its ``attn`` is yielded; operators may have run that are not yet yielded. A
        caller that turns to nothing else for longer than a collective may wait calls `rest`. Once
        closed, no rank writes its KV any more. Of the operators that are led by number no rank
        begins one before the caller asks for it.
        """
        current = _Pass(next(self._numbers), steps, begin, is_led)
        try:
            while current.ahead or self._advance(current):
                yield current.ahead.popleft()
        finally:
            if self._running is current and self._group.failure is None:
                self.rest()
            if current.told and not current.over:
                self._dropped.append(current.number)  # told with what is told next
                if self._running is None and self._group.failure is None:
                    self._meet()

    def tell(self, command: Command) -> None:
        """Has the other ranks begin it, once they have ended what they were told before."""
        self._tell(command, 0)

    def project(self, hidden: Tensor, own: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits of rows of hidden at all ranks, by rank 0's `own`."""
        self.tell(Project(len(hidden)))
        with self.watched():
            self._group.ranks.broadcast(hidden.contiguous())
            return own(hidden)

    def rest(self) -> None:
        """Brings all ranks to a boundary that they agree on; the pass goes on when next asked."""
        current = self._running
        if current is None:
            return
        self._group.counter.request_stop()
        while self._run_operator(current):
            pass

    def close(self) -> None:
        """Ends the other ranks. Passes that were left are lost."""
        if self._group.failure is None:
            with suppress(RankError):
                self.rest()
        self._group.close()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """What goes wrong at rank 0 ends all ranks: they are not where it is any more."""
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            raise self._group.fell(error) from error

    def _advance(self, current: _Pass) -> bool:
        """Runs an operator of the pass on all ranks; False when it was over."""
        while not current.ahead and not current.over:
            if self._running is not current:
                self._resume(current)
            self._run_operator(current)
        return bool(current.ahead)

    def _resume(self, current: _Pass) -> None:
        begin = None if current.told else current.begin()
        self._tell(Run(current.number, begin), current.operators)
        current.told = True
        self._running = current

    def _run_operator(self, current: _Pass) -> bool:
        """Runs one at rank 0. False, with nobody running, where a stop was agreed or at the end."""
        with self.watched():
            if self._enters(current):
                if (boundary := next(current.steps, None)) is not None:
                    current.operators += 1
                    current.reach(boundary)
                    return True
                current.over = True
        self._running = None
        self._operators = current.operators
        if current.over and current.attn is not None:
            self._meet()
            current.ahead.append(current.attn)
        return False

    def _enters(self, current: _Pass) -> bool:
        """Whether the pass's next operator may begin; where that is led the others wait for the
        answer."""
        enters = self._group.counter.enter(0, current.operators)
        if current.is_led(current.operators):
            self._group.ranks.tell(enters)
        return enters

    def _meet(self) -> None:
        """Waits until all ranks have done what they were told, and sees that they came as far."""
        with self.watched():
            for rank, behind in enumerate(self._group.collect(), start=1):
                if behind != self._operators:
                    raise IntegrityError(
                        f"rank {rank} stopped at operator {behind}, rank 0 at {self._operators}"
                    )

    def _tell(self, command: Command, operators: int) -> None:
        """`operators`: of the pass that all ranks go on with."""
        self.rest()
        self._meet()
        with self.watched():
            self._operators = 0
            self._group.counter.begin(operators)
            dropped, self._dropped = tuple(self._dropped), []
            self._group.tell(Order(command, dropped))
