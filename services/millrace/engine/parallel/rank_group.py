"""The processes of ranks 1 and on, which rank 0 starts, commands and watches."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import send_handle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import torch

from millrace.core.errors import ConfigError
from millrace.engine.errors import EngineDied
from millrace.engine.model.communicator import Communicator, PeerLost
from millrace.engine.parallel.child_processes import child_processes, ending
from millrace.engine.parallel.commands import Done, Failed, Instruction
from millrace.engine.parallel.follower import Beside, RankPlace, follow
from millrace.engine.parallel.stop_counter import StopCounter
from millrace.home import temporary_folder

_START_TIMEOUT_S: Final = 120.0  # importing torch, while all ranks do
_VERDICT_S: Final = 3.0  # within which a rank that failed, and ranks that lost it, say so
_FAREWELL_S: Final = 5.0


class RankError(EngineDied):
    """A rank of a tensor-parallel group failed, and the group ends; the message names the rank."""


class RankGroup:
    """The processes of one group. Not thread-safe; after a RankError nothing but `close` works.

    All ranks get a command before rank 0 begins it, and rank 0 collects their answers before it
    sends the next: so all ranks do the same in one order.
    """

    def __init__(
        self,
        size: int,
        *,
        device: str = "cpu",
        devices: Sequence[str] = (),
        threads: int = 1,
        timeout_s: float = 60.0,
        name: str = "",
        beside: Mapping[str, Beside] | None = None,
        ends: Mapping[str, Sequence[Connection]] | None = None,
    ) -> None:
        """Starts ranks 1 to size - 1, which takes seconds.

        Rank r gets device r from `device` on, or ``devices[r]``.

        `timeout_s`: how long a rank may wait for another in a collective. It must be more than
        the longest operator and the longest that a pass is left running, see `Lockstep.rest`.
        `name`: what errors begin with. `beside`: what ranks 1 and on serve beside their passes,
        by name; `besides` has the pipes to it, in the order of the ranks. `ends`: the ranks'
        ends of these pipes, where another process has the others. Raises ConfigError for a
        size below 2 and RankError when a rank does not start.
        """
        if size < 2:
            raise ConfigError(f"tensor parallelism is {size}; a group has at least 2 ranks")
        self.size = size
        names = devices or devices_of_ranks(torch.device(device), size)
        of_ranks = [torch.device(name) for name in names]
        self.device = of_ranks[0]
        #: Ranks on the device that has most of them.
        self.sharers = max(Counter(map(str, of_ranks)).values())
        through_host = self.sharers > 1
        self.failure: RankError | None = None
        context = child_processes()
        self.counter = StopCounter(context, size)
        self._timeout_s = timeout_s
        self._name = name
        self.besides: dict[str, list[Connection]] = {}
        self._pipes: list[Connection] = []
        self._processes: list[ForkServerProcess] = []
        self._awaited = False  # the ranks have yet to answer
        self._reaping = threading.Lock()
        self._folder = TemporaryDirectory(prefix="millrace-ranks-", dir=temporary_folder())
        places = [
            RankPlace(
                rank=rank,
                size=size,
                device=str(of_ranks[rank]),
                through_host=through_host,
                rendezvous=str(Path(self._folder.name) / "rendezvous"),
                timeout_s=timeout_s,
                threads=threads,
            )
            for rank in range(size)
        ]
        for place in places[1:]:
            ours, theirs = context.Pipe()
            also = self._beside(place.rank, beside or {}, ends)
            process = context.Process(
                target=follow, args=(place, theirs, self.counter, also), daemon=True
            )
            process.start()
            theirs.close()
            for _, their_pipe in also.values():
                their_pipe.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._answers(_START_TIMEOUT_S)
        try:
            self.ranks = Communicator(
                0,
                size,
                device=self.device,
                rendezvous=places[0].rendezvous,
                timeout_s=timeout_s,
                through_host=through_host,
            )
        except PeerLost as error:
            raise self.fail(error) from error
        self._answers(timeout_s)
        if self.device.type == "cpu":  # NCCL reads there as long as the group lives
            self._folder.cleanup()

    def _beside(
        self,
        rank: int,
        beside: Mapping[str, Beside],
        ends: Mapping[str, Sequence[Connection]] | None,
    ) -> dict[str, tuple[Beside, Connection]]:
        """Returns what the rank serves, each with the rank's end of its pipe."""
        if ends is not None:
            return {name: (serve, ends[name][rank - 1]) for name, serve in beside.items()}
        also = {}
        for name, serve in beside.items():
            pipe, their_pipe = child_processes().Pipe()
            self.besides.setdefault(name, []).append(pipe)
            also[name] = serve, their_pipe
        return also

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of ranks 1 and on."""
        return tuple(process.pid or 0 for process in self._processes)

    def when_died(self, call: Callable[[RankError], None]) -> None:
        """Has `call` made, on another thread, when a rank dies before the group ends."""
        threading.Thread(target=self._watch, args=(call,), name="ranks", daemon=True).start()

    def _watch(self, call: Callable[[RankError], None]) -> None:
        ended = wait([process.sentinel for process in self._processes])
        if self.failure is not None:
            return  # ended by rank 0
        for rank, process in enumerate(self._processes, start=1):
            if process.sentinel in ended:
                how = ending(self._exitcode(process, _VERDICT_S) or 0)
                died = f"rank {rank} died, {how}"
                call(RankError(f"{self._name}tensor parallelism of {self.size}: {died}"))
                return

    def send(self, order: Instruction) -> None:
        """Gives all ranks an order, after they have answered the one before (`collect`)."""
        if self.failure is not None:
            raise self.failure
        self._awaited = True
        for pipe in self._pipes:
            try:
                pipe.send(order)
            except OSError as error:
                raise self.fail(error) from error

    def hand_over(self, handle: int) -> None:
        """Gives all ranks the file descriptor that the last order asks for."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            try:
                send_handle(pipe, handle, process.pid)
            except OSError as error:
                raise self.fail(error) from error

    def collect(self, timeout_s: float | None = None) -> list[int]:
        """The answers of ranks 1 and on to the last order; empty when none is due."""
        if self.failure is not None:
            raise self.failure
        if not self._awaited:
            return []
        self._awaited = False
        return self._answers(timeout_s or self._timeout_s)

    def fail(self, cause: BaseException) -> RankError:
        """Ends the group for an error that rank 0 met.

        Returns the error that names the rank at fault.
        """
        if self.failure is None:
            self.failure = RankError(self._verdict(cause))
            self._end(0.0)
        return self.failure

    def close(self) -> None:
        """Ends all ranks, and kills those that do not end. May be called twice."""
        if self.failure is None:
            self.failure = RankError("the tensor-parallel group is closed")
            self._end(_FAREWELL_S)

    def _end(self, patience_s: float) -> None:
        for pipe in self._pipes:
            pipe.close()  # a rank that waits for orders ends
        deadline_s = time.monotonic() + patience_s
        for process in self._processes:
            self._exitcode(process, max(0.0, deadline_s - time.monotonic()))
            process.kill()
            self._exitcode(process, None)
        self._folder.cleanup()

    def _exitcode(self, process: ForkServerProcess, patience_s: float | None) -> int | None:
        """Waits for the end of a process; None: it has not ended. One thread at a time may ask."""
        with self._reaping:
            process.join(patience_s)
            return process.exitcode

    def _answers(self, timeout_s: float) -> list[int]:
        deadline_s = time.monotonic() + timeout_s
        found = []
        for pipe in self._pipes:
            try:
                if not pipe.poll(max(0.0, deadline_s - time.monotonic())):
                    raise self.fail(TimeoutError(f"no answer within {timeout_s:g} s"))
                answer = pipe.recv()
            except (EOFError, OSError) as error:
                raise self.fail(error) from error
            if isinstance(answer, Failed):
                raise self.fail(_RankFailed(pipe, answer))
            assert isinstance(answer, Done)
            found.append(answer.count)
        return found

    def _verdict(self, cause: BaseException) -> str:
        """Names the rank at fault, given the first error.

        Names a dead rank first, then a rank that sent its error, then a silent rank, and last a
        rank that only lost another.
        """
        failures = {cause.pipe: cause.failed} if isinstance(cause, _RankFailed) else {}
        self._listen(failures)
        died, failed, silent = [], [], []
        for rank, (pipe, process) in enumerate(
            zip(self._pipes, self._processes, strict=True), start=1
        ):
            last_message = failures.get(pipe)
            if last_message is not None and not last_message.by_peer:
                failed.append(f"rank {rank} failed: {last_message.error}")
            elif last_message is None and (code := self._exitcode(process, 0.0)) is not None:
                died.append(f"rank {rank} died, {ending(code)}")
            elif last_message is None:
                begun = self.counter.begun(rank) + 1
                silent.append(f"rank {rank} says nothing, {begun} operators into its last pass")
        met = " ".join(f"{type(cause).__name__}: {cause}".split())
        of_ours = [f"rank 0 failed: {met}"] if _is_own(cause) else []
        causes = died + failed + of_ours + silent + [f"rank 0 lost another: {met}"]
        return f"{self._name}tensor parallelism of {self.size}: {causes[0]}"

    def _listen(self, failures: dict[Connection, Failed]) -> None:
        """Collects all ranks' last messages, or learns that they are gone, for `_VERDICT_S`."""
        waiting = {
            pipe: process
            for pipe, process in zip(self._pipes, self._processes, strict=True)
            if pipe not in failures
        }
        deadline_s = time.monotonic() + _VERDICT_S
        while waiting and (left_s := deadline_s - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left_s):
                assert isinstance(pipe, Connection)
                try:
                    answer = pipe.recv()
                except (EOFError, OSError):
                    self._exitcode(waiting.pop(pipe), _VERDICT_S)
                    continue
                if isinstance(answer, Failed):
                    failures[pipe] = answer
                    del waiting[pipe]


class _RankFailed(Exception):
    """A rank's last message arrived where an answer was due."""

    def __init__(self, pipe: Connection, failed: Failed) -> None:
        super().__init__(failed.error)
        self.pipe = pipe
        self.failed = failed


def _is_own(cause: BaseException) -> bool:
    """Returns whether the error arose at rank 0 itself rather than between it and another."""
    return not isinstance(cause, PeerLost | OSError | EOFError | _RankFailed)


def devices_of_ranks(first: torch.device, count: int) -> tuple[str, ...]:
    """Returns the devices of so many processes: from `first` on, or all the host."""
    if first.type == "cpu":
        return (str(first),) * count
    return tuple(f"{first.type}:{(first.index or 0) + i}" for i in range(count))
