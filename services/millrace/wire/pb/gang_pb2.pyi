from millrace.wire.pb import common_pb2 as _common_pb2
from millrace.wire.pb import transfer_pb2 as _transfer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GroupMember(_message.Message):
    __slots__ = ("incarnation", "layout", "pages", "buffer_pages", "agent_metadata")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    BUFFER_PAGES_FIELD_NUMBER: _ClassVar[int]
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    incarnation: _common_pb2.Incarnation
    layout: _transfer_pb2.KvLayout
    pages: _containers.RepeatedScalarFieldContainer[int]
    buffer_pages: _containers.RepeatedScalarFieldContainer[int]
    agent_metadata: bytes
    def __init__(self, incarnation: _Optional[_Union[_common_pb2.Incarnation, _Mapping]] = ..., layout: _Optional[_Union[_transfer_pb2.KvLayout, _Mapping]] = ..., pages: _Optional[_Iterable[int]] = ..., buffer_pages: _Optional[_Iterable[int]] = ..., agent_metadata: _Optional[bytes] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "leader", "member", "max_chunk_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    MAX_CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    leader: _common_pb2.Incarnation
    member: GroupMember
    max_chunk_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., leader: _Optional[_Union[_common_pb2.Incarnation, _Mapping]] = ..., member: _Optional[_Union[GroupMember, _Mapping]] = ..., max_chunk_tokens: _Optional[int] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("refusal", "members")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    members: _containers.RepeatedCompositeFieldContainer[GroupMember]
    def __init__(self, refusal: _Optional[str] = ..., members: _Optional[_Iterable[_Union[GroupMember, _Mapping]]] = ...) -> None: ...

class HandInRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "member", "logprobs", "hidden_sum")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SUM_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    member: _common_pb2.Incarnation
    logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobsRun]
    hidden_sum: bytes
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., member: _Optional[_Union[_common_pb2.Incarnation, _Mapping]] = ..., logprobs: _Optional[_Iterable[_Union[PromptLogprobsRun, _Mapping]]] = ..., hidden_sum: _Optional[bytes] = ...) -> None: ...

class PromptLogprobsRun(_message.Message):
    __slots__ = ("start_token", "positions")
    START_TOKEN_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    start_token: int
    positions: _containers.RepeatedCompositeFieldContainer[_common_pb2.PositionLogprobs]
    def __init__(self, start_token: _Optional[int] = ..., positions: _Optional[_Iterable[_Union[_common_pb2.PositionLogprobs, _Mapping]]] = ...) -> None: ...

class HandInReply(_message.Message):
    __slots__ = ("refusal",)
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    def __init__(self, refusal: _Optional[str] = ...) -> None: ...
