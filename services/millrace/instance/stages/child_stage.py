"""A later stage as a child process of the first stage's process, or of a host of stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Protocol

from millrace.engine.parallel.child_processes import child_processes, ending
from millrace.engine.parallel.follower import Beside
from millrace.instance.stages.stage_process import StagePlace, serve_stage

_FAREWELL_S = 5.0


class LaterStage(Protocol):
    """A stage that runs elsewhere: in a child process, or on another host."""

    @property
    def where(self) -> str:
        """Returns the stage's host for messages; "": this one."""

    @property
    def pipe(self) -> Connection:
        """Returns the pipe of its commands and answers."""

    @property
    def besides(self) -> Mapping[str, Sequence[Connection]]:
        """Returns the pipes to what each of its ranks serves beside its passes, by name."""

    def ending(self, timeout_s: float) -> str:
        """Waits for its end. Returns how it has ended; "" if it has not."""

    def close(self) -> None:
        """Ends it, by force if need be. Its pipe must be closed before."""


class ChildStage:
    """A `LaterStage` in a child process."""

    where = ""

    def __init__(self, place: StagePlace, beside: Mapping[str, Beside]) -> None:
        """Starts the process. `beside`: what each rank serves beside its passes."""
        context = child_processes()
        self.pipe, theirs = context.Pipe()
        pairs = {name: [context.Pipe() for _ in place.devices] for name in beside}
        ends = {
            name: (beside[name], [end for _, end in of_ranks]) for name, of_ranks in pairs.items()
        }
        self.besides = {name: [pipe for pipe, _ in of_ranks] for name, of_ranks in pairs.items()}
        # Not a daemon: its ranks are its child processes.
        self._process = context.Process(
            target=serve_stage, args=(place, theirs, ends), name=place.name
        )
        self._process.start()
        theirs.close()
        for of_ranks in pairs.values():
            for _, end in of_ranks:
                end.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None  # it was started
        return self._process.pid

    def ending(self, timeout_s: float) -> str:
        """`LaterStage.ending`."""
        self._process.join(timeout_s)
        code = self._process.exitcode
        return "" if code is None else ending(code)

    def close(self) -> None:
        """`LaterStage.close`."""
        self._process.join(_FAREWELL_S)
        self._process.kill()
        self._process.join()
