"""Calls that rank 0 makes of an object in every other rank, beside their passes.

All ranks get a call before any answers, so that they work at once. A rank answers its calls in
order, on the thread of the pipe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any, Final

from millrace.engine.parallel.rank_group import RankError

#: Seconds for a rank to answer: a copy of many pages, or a layer of long shards.
CALL_TIMEOUT_S: Final = 60.0


class RankCalls:
    """Rank 0's side. The first call opens the object, with the call's arguments.

    Any thread may make calls without an answer; one thread at a time those with one.
    """

    def __init__(self, pipes: Sequence[Connection], pids: Sequence[int]) -> None:
        """`pipes`: to `answer_calls` of ranks 1 and on, in their order; `pids`: their processes."""
        self.ranks = 1 + len(pipes)  # of the group
        self._pipes = tuple(pipes)
        self._pids = tuple(pids)
        self._sending = threading.Lock()

    def call(self, method: str, *arguments: Any) -> list[Any]:  # noqa: ANN401
        """Returns the ranks' results. Raises RankError as `collect` does."""
        self.begin(method, *arguments)
        return self.collect()

    def begin(self, method: str, *arguments: Any) -> None:  # noqa: ANN401
        """Makes a call, whose results `collect` returns."""
        self._send((method, arguments, True))

    def tell(self, method: str, *arguments: Any) -> None:  # noqa: ANN401
        """Makes a call that has no result and, where rank 0's own has succeeded, can't fail."""
        self._send((method, arguments, False))

    def hand_over(self, handle: int) -> None:
        """Gives the file descriptor that the last `begin` asks for."""
        with self._sending:
            for pipe, pid in zip(self._pipes, self._pids, strict=True):
                send_handle(pipe, handle, pid)

    def collect(self) -> list[Any]:
        """Returns the results of the last `begin`.

        Raises RankError, which names the rank, when a rank is gone, fails or is silent.
        """
        found = []
        for rank, pipe in enumerate(self._pipes, start=1):
            try:
                if not pipe.poll(CALL_TIMEOUT_S):
                    raise RankError(f"rank {rank} gave no answer within {CALL_TIMEOUT_S:g} s")
                value, error = pipe.recv()
            except (EOFError, OSError) as gone:
                raise RankError(f"rank {rank} is gone") from gone
            if error:
                raise RankError(f"rank {rank} failed: {error}")
            found.append(value)
        return found

    def _send(self, call: tuple[str, tuple[Any, ...], bool]) -> None:
        with self._sending:
            for rank, pipe in enumerate(self._pipes, start=1):
                try:
                    pipe.send(call)
                except OSError as gone:
                    raise RankError(f"rank {rank} is gone") from gone


def answer_calls(pipe: Connection, open_target: Callable[..., object]) -> None:
    """Answers rank 0's calls in the rank; returns when rank 0 is gone or closes the pipe.

    The first call's arguments open the target; the other calls are of its methods.
    """
    target = None
    with suppress(EOFError, OSError):
        while True:
            method, arguments, is_answered = pipe.recv()
            value, error = None, ""
            try:
                if target is None:
                    target = open_target(*arguments)
                else:
                    value = getattr(target, method)(*arguments)
            except Exception as failed:  # rank 0 gets every error
                error = f"{type(failed).__name__}: {failed}"
            if is_answered:
                pipe.send((value, error))
            elif error:
                break
    pipe.close()
