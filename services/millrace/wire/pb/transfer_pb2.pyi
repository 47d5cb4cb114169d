from millrace.wire.pb import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Dtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[Dtype]
    DTYPE_FLOAT32: _ClassVar[Dtype]
    DTYPE_BFLOAT16: _ClassVar[Dtype]
    DTYPE_FLOAT16: _ClassVar[Dtype]
DTYPE_UNSPECIFIED: Dtype
DTYPE_FLOAT32: Dtype
DTYPE_BFLOAT16: Dtype
DTYPE_FLOAT16: Dtype

class KvLayout(_message.Message):
    __slots__ = ("model_hash", "dtype", "num_layers", "num_kv_heads", "head_dim", "page_tokens", "head_start", "head_count", "num_pages", "parts", "layer_start", "model_layers", "copies", "stages")
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HEAD_START_FIELD_NUMBER: _ClassVar[int]
    HEAD_COUNT_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    LAYER_START_FIELD_NUMBER: _ClassVar[int]
    MODEL_LAYERS_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    model_hash: str
    dtype: Dtype
    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int
    head_start: int
    head_count: int
    num_pages: int
    parts: int
    layer_start: int
    model_layers: int
    copies: int
    stages: int
    def __init__(self, model_hash: _Optional[str] = ..., dtype: _Optional[_Union[Dtype, str]] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., page_tokens: _Optional[int] = ..., head_start: _Optional[int] = ..., head_count: _Optional[int] = ..., num_pages: _Optional[int] = ..., parts: _Optional[int] = ..., layer_start: _Optional[int] = ..., model_layers: _Optional[int] = ..., copies: _Optional[int] = ..., stages: _Optional[int] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("request_id", "sender", "receiver", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    sender: _common_pb2.Incarnation
    receiver: _common_pb2.Incarnation
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., sender: _Optional[_Union[_common_pb2.Incarnation, _Mapping]] = ..., receiver: _Optional[_Union[_common_pb2.Incarnation, _Mapping]] = ..., attempt: _Optional[int] = ...) -> None: ...

class HandshakeRequest(_message.Message):
    __slots__ = ("ticket", "layout", "start_token", "num_tokens", "agent_metadata")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    START_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    layout: KvLayout
    start_token: int
    num_tokens: int
    agent_metadata: bytes
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ..., start_token: _Optional[int] = ..., num_tokens: _Optional[int] = ..., agent_metadata: _Optional[bytes] = ...) -> None: ...

class HandshakeReply(_message.Message):
    __slots__ = ("refusal", "grant")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    grant: HandshakeGrant
    def __init__(self, refusal: _Optional[str] = ..., grant: _Optional[_Union[HandshakeGrant, _Mapping]] = ...) -> None: ...

class HandshakeGrant(_message.Message):
    __slots__ = ("lease", "layout", "pages", "agent_metadata", "region", "lease_s", "buffered", "buffer_offset", "buffer_bytes", "checksums")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    BUFFERED_FIELD_NUMBER: _ClassVar[int]
    BUFFER_OFFSET_FIELD_NUMBER: _ClassVar[int]
    BUFFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    lease: int
    layout: KvLayout
    pages: _containers.RepeatedScalarFieldContainer[int]
    agent_metadata: bytes
    region: int
    lease_s: float
    buffered: bool
    buffer_offset: int
    buffer_bytes: int
    checksums: bool
    def __init__(self, lease: _Optional[int] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ..., pages: _Optional[_Iterable[int]] = ..., agent_metadata: _Optional[bytes] = ..., region: _Optional[int] = ..., lease_s: _Optional[float] = ..., buffered: _Optional[bool] = ..., buffer_offset: _Optional[int] = ..., buffer_bytes: _Optional[int] = ..., checksums: _Optional[bool] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token_id", "logprobs")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprobs: _common_pb2.PositionLogprobs
    def __init__(self, token_id: _Optional[int] = ..., logprobs: _Optional[_Union[_common_pb2.PositionLogprobs, _Mapping]] = ...) -> None: ...

class FinishedPrefill(_message.Message):
    __slots__ = ("total_chunks", "first_tokens", "spans", "prompt_logprobs", "cached_tokens")
    TOTAL_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    total_chunks: int
    first_tokens: _containers.RepeatedCompositeFieldContainer[FirstToken]
    spans: _containers.RepeatedCompositeFieldContainer[_common_pb2.Span]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PositionLogprobs]
    cached_tokens: int
    def __init__(self, total_chunks: _Optional[int] = ..., first_tokens: _Optional[_Iterable[_Union[FirstToken, _Mapping]]] = ..., spans: _Optional[_Iterable[_Union[_common_pb2.Span, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.PositionLogprobs, _Mapping]]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class FinishPrefillRequest(_message.Message):
    __slots__ = ("ticket", "finished")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    finished: FinishedPrefill
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ..., finished: _Optional[_Union[FinishedPrefill, _Mapping]] = ...) -> None: ...

class FinishPrefillReply(_message.Message):
    __slots__ = ("refusal",)
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    def __init__(self, refusal: _Optional[str] = ...) -> None: ...

class AbortTransferRequest(_message.Message):
    __slots__ = ("ticket", "reason", "drained")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    reason: str
    drained: bool
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ..., reason: _Optional[str] = ..., drained: _Optional[bool] = ...) -> None: ...

class AbortTransferReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TokenRun(_message.Message):
    __slots__ = ("start_token", "num_tokens", "slot")
    START_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    start_token: int
    num_tokens: int
    slot: int
    def __init__(self, start_token: _Optional[int] = ..., num_tokens: _Optional[int] = ..., slot: _Optional[int] = ...) -> None: ...

class SendHistoryRequest(_message.Message):
    __slots__ = ("ticket", "layout", "pages", "runs", "agent_metadata", "region")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    layout: KvLayout
    pages: _containers.RepeatedScalarFieldContainer[int]
    runs: _containers.RepeatedCompositeFieldContainer[TokenRun]
    agent_metadata: bytes
    region: int
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ..., pages: _Optional[_Iterable[int]] = ..., runs: _Optional[_Iterable[_Union[TokenRun, _Mapping]]] = ..., agent_metadata: _Optional[bytes] = ..., region: _Optional[int] = ...) -> None: ...

class SendHistoryReply(_message.Message):
    __slots__ = ("refusal",)
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    def __init__(self, refusal: _Optional[str] = ...) -> None: ...

class ExamineRequest(_message.Message):
    __slots__ = ("instance_ids",)
    INSTANCE_IDS_FIELD_NUMBER: _ClassVar[int]
    instance_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, instance_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Examination(_message.Message):
    __slots__ = ("version", "unix_s", "device", "peers")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    version: str
    unix_s: float
    device: str
    peers: _containers.RepeatedCompositeFieldContainer[PeerProbe]
    def __init__(self, version: _Optional[str] = ..., unix_s: _Optional[float] = ..., device: _Optional[str] = ..., peers: _Optional[_Iterable[_Union[PeerProbe, _Mapping]]] = ...) -> None: ...

class PeerProbe(_message.Message):
    __slots__ = ("instance_id", "error", "seconds")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    error: str
    seconds: float
    def __init__(self, instance_id: _Optional[str] = ..., error: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class ProbeEndpoint(_message.Message):
    __slots__ = ("agent_metadata", "seed")
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    agent_metadata: bytes
    seed: int
    def __init__(self, agent_metadata: _Optional[bytes] = ..., seed: _Optional[int] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("asker", "endpoint")
    ASKER_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    asker: _common_pb2.Incarnation
    endpoint: ProbeEndpoint
    def __init__(self, asker: _Optional[_Union[_common_pb2.Incarnation, _Mapping]] = ..., endpoint: _Optional[_Union[ProbeEndpoint, _Mapping]] = ...) -> None: ...

class ProbeReply(_message.Message):
    __slots__ = ("endpoint", "result")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    endpoint: ProbeEndpoint
    result: ProbeResult
    def __init__(self, endpoint: _Optional[_Union[ProbeEndpoint, _Mapping]] = ..., result: _Optional[_Union[ProbeResult, _Mapping]] = ...) -> None: ...

class ProbeResult(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: str
    def __init__(self, error: _Optional[str] = ...) -> None: ...
