"""The messages of an SP group's members to their leader before and after a chunk (Tetris §4.1)."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.core.errors import TransferError
from millrace.core.incarnation import Incarnation
from millrace.core.kv.layout import KvLayout
from millrace.core.token_events import PositionLogprobs


class GroupError(TransferError):
    """The members of a group could not join. Another attempt may succeed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """A member, its pages of the request in the order of its layout, and how to reach it.

    `buffer_pages` are lent to the ring, one buffer after the other.
    """

    incarnation: Incarnation
    layout: KvLayout
    pages: tuple[int, ...]
    buffer_pages: tuple[int, ...]
    agent_metadata: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinAsk:
    """A member joins the group of one attempt at its `leader`. All members cut passes by the same
    `max_chunk_tokens`.
    """

    request_id: str
    attempt: int
    leader: Incarnation
    member: GroupMember
    max_chunk_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobsRun:
    """Log-probabilities at neighbouring positions of the prompt, from `start_token` on."""

    start_token: int
    positions: tuple[PositionLogprobs, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandIn:
    """What a member computed of the results that the leader reports."""

    request_id: str
    attempt: int
    member: Incarnation
    logprobs: tuple[PromptLogprobsRun, ...] = ()
    hidden_sum: bytes = b""  # of its tokens' final hidden states: float64 [hidden_size]
