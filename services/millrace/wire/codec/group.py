"""Translates the messages between the members of an SP group and their leader."""

from __future__ import annotations

from collections.abc import Iterable

from millrace.core.instance.group import GroupMember, HandIn, JoinAsk, PromptLogprobsRun
from millrace.wire.codec.incarnation import incarnation_message, incarnation_of
from millrace.wire.codec.token_events import logprobs_message, present_logprobs_of
from millrace.wire.codec.transfer import layout_message, layout_of
from millrace.wire.pb import gang_pb2


def join_message(ask: JoinAsk) -> gang_pb2.JoinRequest:
    return gang_pb2.JoinRequest(
        request_id=ask.request_id,
        attempt=ask.attempt,
        leader=incarnation_message(ask.leader),
        member=_member_message(ask.member),
        max_chunk_tokens=ask.max_chunk_tokens,
    )


def join_of(message: gang_pb2.JoinRequest) -> JoinAsk:
    """Decodes a member's request to join. Raises TransferError for a bad layout."""
    return JoinAsk(
        request_id=message.request_id,
        attempt=message.attempt,
        leader=incarnation_of(message.leader),
        member=_member_of(message.member),
        max_chunk_tokens=message.max_chunk_tokens,
    )


def members_message(members: Iterable[GroupMember]) -> gang_pb2.JoinReply:
    return gang_pb2.JoinReply(members=map(_member_message, members))


def members_of(reply: gang_pb2.JoinReply) -> list[GroupMember]:
    """Decodes the members of a group. Raises TransferError for a bad layout."""
    return [_member_of(member) for member in reply.members]


def hand_in_message(handed_in: HandIn) -> gang_pb2.HandInRequest:
    return gang_pb2.HandInRequest(
        request_id=handed_in.request_id,
        attempt=handed_in.attempt,
        member=incarnation_message(handed_in.member),
        logprobs=[
            gang_pb2.PromptLogprobsRun(
                start_token=run.start_token, positions=map(logprobs_message, run.positions)
            )
            for run in handed_in.logprobs
        ],
    )


def hand_in_of(message: gang_pb2.HandInRequest) -> HandIn:
    return HandIn(
        request_id=message.request_id,
        attempt=message.attempt,
        member=incarnation_of(message.member),
        logprobs=tuple(
            PromptLogprobsRun(
                start_token=run.start_token,
                positions=tuple(map(present_logprobs_of, run.positions)),
            )
            for run in message.logprobs
        ),
    )


def _member_message(member: GroupMember) -> gang_pb2.GroupMember:
    return gang_pb2.GroupMember(
        incarnation=incarnation_message(member.incarnation),
        layout=layout_message(member.layout),
        pages=member.pages,
        buffer_pages=member.buffer_pages,
        agent_metadata=member.agent_metadata,
    )


def _member_of(message: gang_pb2.GroupMember) -> GroupMember:
    return GroupMember(
        incarnation=incarnation_of(message.incarnation),
        layout=layout_of(message.layout),
        pages=tuple(message.pages),
        buffer_pages=tuple(message.buffer_pages),
        agent_metadata=message.agent_metadata,
    )
