"""Calls that the leader of an instance makes of an object in other members, beside their passes.

The members of an instance are the ranks of its stages, each a process; rank 0 of the first stage
leads. All members get a call before any answers, so that they work at once. A member answers its
calls in order, on the thread of the pipe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any, Final

from millrace.engine.parallel.rank_group import RankError

#: Seconds for a member to answer: a copy of many pages, or a layer of long shards.
CALL_TIMEOUT_S: Final = 60.0


_NO_PID: Final = 0
"""`send_handle` asks for a process's id, and on Linux needs none."""


class MemberCalls:
    """The leader's side. The first call opens the object, with the call's arguments.

    Any thread may make calls without an answer; one thread at a time those with one.
    """

    def __init__(self, members: Mapping[str, Connection], *, is_here: bool = True) -> None:
        """`members`: pipes to `answer_calls`, by the members' names. `is_here`: they are on the
        leader's machine, and can share memory with it."""
        self.is_here = is_here
        self._members = dict(members)
        self._sending = threading.Lock()

    def __len__(self) -> int:
        """Returns the number of members."""
        return len(self._members)

    def call(self, method: str, *arguments: Any) -> list[Any]:  # noqa: ANN401
        """Returns the members' results. Raises RankError as `collect` does."""
        self.begin(method, *arguments)
        return self.collect()

    def begin(self, method: str, *arguments: Any) -> None:  # noqa: ANN401
        """Makes a call, whose results `collect` returns."""
        self._send((method, arguments, True))

    def tell(self, method: str, *arguments: Any) -> None:  # noqa: ANN401
        """Makes a call that has no result and, where the leader's own has succeeded, can't fail."""
        self._send((method, arguments, False))

    def hand_over(self, handle: int) -> None:
        """Gives the file descriptor that the last `begin` asks for."""
        with self._sending:
            for pipe in self._members.values():
                send_handle(pipe, handle, _NO_PID)

    def collect(self) -> list[Any]:
        """Returns the results of the last `begin`.

        Raises RankError, which names the member, when a member is gone, fails or is silent.
        """
        found = []
        for name, pipe in self._members.items():
            try:
                if not pipe.poll(CALL_TIMEOUT_S):
                    raise RankError(f"{name} gave no answer within {CALL_TIMEOUT_S:g} s")
                value, error = pipe.recv()
            except (EOFError, OSError) as gone:
                raise RankError(f"{name} is gone") from gone
            if error:
                raise RankError(f"{name} failed: {error}")
            found.append(value)
        return found

    def _send(self, call: tuple[str, tuple[Any, ...], bool]) -> None:
        with self._sending:
            for name, pipe in self._members.items():
                try:
                    pipe.send(call)
                except OSError as gone:
                    raise RankError(f"{name} is gone") from gone


def answer_calls(pipe: Connection, open_target: Callable[..., object]) -> None:
    """Answers the leader's calls in a member; returns when the leader is gone or closes the pipe.

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
            except Exception as failed:  # the leader gets every error
                error = f"{type(failed).__name__}: {failed}"
            if is_answered:
                pipe.send((value, error))
            elif error:
                break
    pipe.close()
