"""Calls beside the passes: to all members at once, with errors that name the member."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from millrace.core.errors import CapacityError
from millrace.engine.parallel.member_calls import MemberCalls, answer_calls
from millrace.engine.parallel.rank_group import RankError
from support.deadlines import HANG_S


class Sum:
    """A target. Its first number may not be 13."""

    def __init__(self, start: int) -> None:
        if start == 13:
            raise CapacityError("no room for 13")
        self.total = start

    def add(self, number: int) -> int:
        self.total += number
        return self.total


@contextmanager
def ranks(count: int) -> Iterator[tuple[MemberCalls, list[Connection]]]:
    """So many ranks beside rank 0, on threads of this process, and rank 0's pipes to them."""
    with ExitStack() as stack:
        pipes = []
        for _ in range(count):
            ours, theirs = Pipe()
            thread = threading.Thread(target=answer_calls, args=(theirs, Sum))
            thread.start()
            stack.callback(thread.join, HANG_S)
            stack.callback(ours.close)
            pipes.append(ours)
        yield MemberCalls({f"rank {i}": pipe for i, pipe in enumerate(pipes, 1)}), pipes


def test_calls_come_in_order_whether_they_are_answered_or_not() -> None:
    with ranks(2) as (calls, _):
        assert len(calls) == 2
        assert calls.call("open", 1) == [None, None]
        calls.tell("add", 10)
        assert calls.call("add", 100) == [111, 111]


def test_a_rank_that_fails_is_named_and_goes_on() -> None:
    with ranks(1) as (calls, _):
        with pytest.raises(RankError, match="rank 1 failed: CapacityError: no room for 13"):
            calls.call("open", 13)
        calls.call("open", 1)
        with pytest.raises(RankError, match="rank 1 failed: AttributeError"):
            calls.call("subtract", 1)
        assert calls.call("add", 1) == [2]


def test_a_rank_that_fails_where_nobody_waits_is_gone() -> None:
    with ranks(1) as (calls, _):
        calls.call("open", 1)
        calls.tell("subtract", 1)
        with pytest.raises(RankError, match="rank 1 is gone"):
            calls.call("add", 1)


def test_a_rank_whose_pipe_has_ended_is_named() -> None:
    with ranks(2) as (calls, pipes):
        calls.call("open", 1)
        pipes[1].close()
        with pytest.raises(RankError, match="rank 2 is gone"):
            calls.call("add", 1)
