from millrace.wire.pb import common_pb2 as _common_pb2
from millrace.wire.pb import transfer_pb2 as _transfer_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HoldRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "owner", "worker", "layout", "start_token", "end_token", "prompt_tokens", "traceparent", "arrival_unix_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    START_TOKEN_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    owner: _common_pb2.Incarnation
    worker: _common_pb2.Incarnation
    layout: _transfer_pb2.KvLayout
    start_token: int
    end_token: int
    prompt_tokens: int
    traceparent: str
    arrival_unix_s: float
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., owner: _Optional[_Union[_common_pb2.Incarnation, _Mapping]] = ..., worker: _Optional[_Union[_common_pb2.Incarnation, _Mapping]] = ..., layout: _Optional[_Union[_transfer_pb2.KvLayout, _Mapping]] = ..., start_token: _Optional[int] = ..., end_token: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., traceparent: _Optional[str] = ..., arrival_unix_s: _Optional[float] = ...) -> None: ...

class HoldReply(_message.Message):
    __slots__ = ("opened", "landed", "failed")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    LANDED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    opened: Opened
    landed: Landed
    failed: str
    def __init__(self, opened: _Optional[_Union[Opened, _Mapping]] = ..., landed: _Optional[_Union[Landed, _Mapping]] = ..., failed: _Optional[str] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("shard",)
    SHARD_FIELD_NUMBER: _ClassVar[int]
    shard: int
    def __init__(self, shard: _Optional[int] = ...) -> None: ...

class Landed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("owner", "worker", "layout", "max_rows", "agent_metadata", "region", "offset")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    owner: _common_pb2.Incarnation
    worker: _common_pb2.Incarnation
    layout: _transfer_pb2.KvLayout
    max_rows: int
    agent_metadata: bytes
    region: int
    offset: int
    def __init__(self, owner: _Optional[_Union[_common_pb2.Incarnation, _Mapping]] = ..., worker: _Optional[_Union[_common_pb2.Incarnation, _Mapping]] = ..., layout: _Optional[_Union[_transfer_pb2.KvLayout, _Mapping]] = ..., max_rows: _Optional[int] = ..., agent_metadata: _Optional[bytes] = ..., region: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class AttachReply(_message.Message):
    __slots__ = ("refusal", "grant")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    grant: AttachGrant
    def __init__(self, refusal: _Optional[str] = ..., grant: _Optional[_Union[AttachGrant, _Mapping]] = ...) -> None: ...

class AttachGrant(_message.Message):
    __slots__ = ("slot", "agent_metadata", "region", "offset")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    slot: int
    agent_metadata: bytes
    region: int
    offset: int
    def __init__(self, slot: _Optional[int] = ..., agent_metadata: _Optional[bytes] = ..., region: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...
