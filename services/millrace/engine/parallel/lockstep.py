"""Passes that all ranks of a group run together: rank 0 leads, the other ranks follow.

Rank 0's caller decides. While the caller continues a pass, the other ranks run the pass too,
ahead of rank 0 as far as their collectives allow. Where the caller begins another pass, all ranks
stop at an operator that none has begun (`StopCounter`), and rank 0 runs up to that operator as
well. Rank 0 yields the operators that ran so, unasked, when the caller resumes the pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count

from torch import Tensor

from millrace.core.errors import IntegrityError
from millrace.engine.errors import EngineDied
from millrace.engine.forward.passes import Boundary
from millrace.engine.parallel.commands import Begin, Command, Instruction, Project, Run
from millrace.engine.parallel.rank_group import RankError, RankGroup


def _is_free(operator: int) -> bool:
    return False


@dataclass(slots=True, eq=False)
class _Pass:
    number: int
    steps: Iterator[Boundary]
    begin: Callable[[], Begin]  # what the other ranks need to begin the pass
    is_led: Callable[[int], bool]
    operators: int = 0  # that rank 0 has run
    ahead: deque[Boundary] = field(default_factory=deque)  # to be yielded
    attn: Boundary | None = None  # that rank 0 has run, and the other ranks perhaps not
    announced: bool = False  # the other ranks have begun the pass
    over: bool = False

    def reach(self, boundary: Boundary) -> None:
        """Notes that rank 0 has come to a boundary.

        After o_proj's all-reduce all ranks have run attn.
        """
        if boundary.operator == "attn":
            self.attn = boundary
            return
        if self.attn is not None:
            self.ahead.append(self.attn)
            self.attn = None
        self.ahead.append(boundary)


class Lockstep:
    """Rank 0's side: the `Processes` of a group of ranks. One thread at a time uses it.

    RankError, from any call, ends the group.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._operators = 0  # of the last command, that rank 0 has run
        self._running: _Pass | None = None  # that all ranks are in the middle of
        self._dropped: list[int] = []
        self._numbers = count()

    def run(
        self,
        steps: Iterator[Boundary],
        begin: Callable[[], Begin],
        is_led: Callable[[int], bool] = _is_free,
    ) -> Generator[Boundary]:
        """Runs rank 0's `steps` of a pass, while all other ranks run theirs.

        The next call of this object suspends the pass where its caller has left it; see `rest` for
        a caller without a next call. The KV of a layer is in the pages of all ranks once its
        ``attn`` is yielded; operators may have run that are not yet yielded. After `close()` no
        rank writes the pass's KV any more. No rank begins an operator for which `is_led` is true
        before the caller asks for the operator.
        """
        current = _Pass(next(self._numbers), steps, begin, is_led)
        try:
            while current.ahead or self._advance(current):
                yield current.ahead.popleft()
        finally:
            if self._running is current and self._group.failure is None:
                self.rest()
            if current.announced and not current.over:
                self._dropped.append(current.number)  # sent with the next command
                if self._running is None and self._group.failure is None:
                    self._meet()

    def send(self, command: Command) -> None:
        """Has the other ranks carry out a command, after the commands before."""
        self._tell(command, 0)

    def together(self, command: Command, own: Callable[[], None]) -> None:
        """Has the other ranks carry out a command, and rank 0 its `own` part. Returns when all
        have."""
        self.send(command)
        with self.watched():
            own()
        self._meet()

    def project(self, hidden: Tensor, own: Callable[[Tensor], Tensor]) -> Tensor:
        """Computes logits of rows of hidden at all ranks, at rank 0 by `own`."""
        self.send(Project(len(hidden)))
        with self.watched():
            self._group.ranks.broadcast(hidden.contiguous())
            return own(hidden)

    def rest(self) -> None:
        """`Processes.rest`; the pass continues when its caller resumes it."""
        current = self._running
        if current is None:
            return
        self._group.counter.request_stop()
        while self._run_operator(current):
            pass

    def when_died(self, call: Callable[[EngineDied], None]) -> None:
        """`Processes.when_died`."""
        self._group.when_died(call)

    def close(self) -> None:
        """`Processes.close`."""
        if self._group.failure is None:
            with suppress(RankError):
                self.rest()
        self._group.close()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Ends all ranks when rank 0 raises an error: they no longer match rank 0."""
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            raise self._group.fail(error) from error

    def _advance(self, current: _Pass) -> bool:
        """Runs an operator of the pass on all ranks. Returns False when the pass was over."""
        while not current.ahead and not current.over:
            if self._running is not current:
                self._resume(current)
            self._run_operator(current)
        return bool(current.ahead)

    def _resume(self, current: _Pass) -> None:
        begin = None if current.announced else current.begin()
        self._tell(Run(current.number, begin), current.operators)
        current.announced = True
        self._running = current

    def _run_operator(self, current: _Pass) -> bool:
        """Runs an operator at rank 0. Returns False, and no rank runs any more, at an agreed stop
        and at the end of the pass."""
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
        """Returns whether the pass's next operator may begin.

        For a led operator the other ranks wait for the answer.
        """
        enters = self._group.counter.enter(0, current.operators)
        if current.is_led(current.operators):
            self._group.ranks.broadcast_flag(enters)
        return enters

    def _meet(self) -> None:
        """Waits until all ranks have carried out the last command. Raises IntegrityError when a
        rank has not stopped where rank 0 has."""
        with self.watched():
            for rank, done in enumerate(self._group.collect(), start=1):
                if done != self._operators:
                    raise IntegrityError(
                        f"rank {rank} stopped at operator {done}, rank 0 at {self._operators}"
                    )

    def _tell(self, command: Command, operators: int) -> None:
        """`operators`: how many of the pass have run."""
        self.rest()
        self._meet()
        with self.watched():
            self._operators = 0
            self._group.counter.begin(operators)
            dropped, self._dropped = tuple(self._dropped), []
            self._group.send(Instruction(command, dropped))
