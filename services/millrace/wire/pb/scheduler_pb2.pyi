from millrace.wire.pb import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RequestState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_STATE_UNSPECIFIED: _ClassVar[RequestState]
    REQUEST_STATE_QUEUED: _ClassVar[RequestState]
    REQUEST_STATE_PREFILLING: _ClassVar[RequestState]
    REQUEST_STATE_TRANSFERRING: _ClassVar[RequestState]

class RefusalCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSAL_CODE_UNSPECIFIED: _ClassVar[RefusalCode]
    REFUSAL_CODE_OVERLOADED: _ClassVar[RefusalCode]
    REFUSAL_CODE_UNAVAILABLE: _ClassVar[RefusalCode]
    REFUSAL_CODE_TOO_LARGE: _ClassVar[RefusalCode]
    REFUSAL_CODE_INVALID: _ClassVar[RefusalCode]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_MIXED: _ClassVar[Role]
    ROLE_KVP: _ClassVar[Role]

class Fault(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAULT_UNSPECIFIED: _ClassVar[Fault]
    FAULT_COMPUTE: _ClassVar[Fault]
    FAULT_TRANSFER: _ClassVar[Fault]

class Preemption(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PREEMPTION_UNSPECIFIED: _ClassVar[Preemption]
    PREEMPTION_NONE: _ClassVar[Preemption]
    PREEMPTION_CHUNK: _ClassVar[Preemption]
    PREEMPTION_LAYER: _ClassVar[Preemption]
    PREEMPTION_OPERATOR: _ClassVar[Preemption]

class Breaker(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BREAKER_UNSPECIFIED: _ClassVar[Breaker]
    BREAKER_CLOSED: _ClassVar[Breaker]
    BREAKER_OPEN: _ClassVar[Breaker]
    BREAKER_HALF_OPEN: _ClassVar[Breaker]
REQUEST_STATE_UNSPECIFIED: RequestState
REQUEST_STATE_QUEUED: RequestState
REQUEST_STATE_PREFILLING: RequestState
REQUEST_STATE_TRANSFERRING: RequestState
REFUSAL_CODE_UNSPECIFIED: RefusalCode
REFUSAL_CODE_OVERLOADED: RefusalCode
REFUSAL_CODE_UNAVAILABLE: RefusalCode
REFUSAL_CODE_TOO_LARGE: RefusalCode
REFUSAL_CODE_INVALID: RefusalCode
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_MIXED: Role
ROLE_KVP: Role
FAULT_UNSPECIFIED: Fault
FAULT_COMPUTE: Fault
FAULT_TRANSFER: Fault
PREEMPTION_UNSPECIFIED: Preemption
PREEMPTION_NONE: Preemption
PREEMPTION_CHUNK: Preemption
PREEMPTION_LAYER: Preemption
PREEMPTION_OPERATOR: Preemption
BREAKER_UNSPECIFIED: Breaker
BREAKER_CLOSED: Breaker
BREAKER_OPEN: Breaker
BREAKER_HALF_OPEN: Breaker

class ProxyMessage(_message.Message):
    __slots__ = ("hello", "submit", "cancel", "load", "ask", "open", "all_open", "keep_traces", "seen_epoch")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ALL_OPEN_FIELD_NUMBER: _ClassVar[int]
    KEEP_TRACES_FIELD_NUMBER: _ClassVar[int]
    SEEN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    hello: _common_pb2.Incarnation
    submit: SubmitBatch
    cancel: CancelRequest
    load: ProxyLoad
    ask: AskProgress
    open: OpenRequest
    all_open: AllOpen
    keep_traces: KeepTraces
    seen_epoch: int
    def __init__(self, hello: _Optional[_Union[_common_pb2.Incarnation, _Mapping]] = ..., submit: _Optional[_Union[SubmitBatch, _Mapping]] = ..., cancel: _Optional[_Union[CancelRequest, _Mapping]] = ..., load: _Optional[_Union[ProxyLoad, _Mapping]] = ..., ask: _Optional[_Union[AskProgress, _Mapping]] = ..., open: _Optional[_Union[OpenRequest, _Mapping]] = ..., all_open: _Optional[_Union[AllOpen, _Mapping]] = ..., keep_traces: _Optional[_Union[KeepTraces, _Mapping]] = ..., seen_epoch: _Optional[int] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("request", "decode", "age_s", "token_age_s")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_AGE_S_FIELD_NUMBER: _ClassVar[int]
    request: _common_pb2.RequestSpec
    decode: _common_pb2.Incarnation
    age_s: float
    token_age_s: float
    def __init__(self, request: _Optional[_Union[_common_pb2.RequestSpec, _Mapping]] = ..., decode: _Optional[_Union[_common_pb2.Incarnation, _Mapping]] = ..., age_s: _Optional[float] = ..., token_age_s: _Optional[float] = ...) -> None: ...

class AllOpen(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AskProgress(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class KeepTraces(_message.Message):
    __slots__ = ("trace_ids",)
    TRACE_IDS_FIELD_NUMBER: _ClassVar[int]
    trace_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, trace_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ProxyLoad(_message.Message):
    __slots__ = ("parked_requests",)
    PARKED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    parked_requests: int
    def __init__(self, parked_requests: _Optional[int] = ...) -> None: ...

class SubmitBatch(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[_common_pb2.RequestSpec]
    def __init__(self, requests: _Optional[_Iterable[_Union[_common_pb2.RequestSpec, _Mapping]]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id", "reason")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reason: str
    def __init__(self, request_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ProxyUpdate(_message.Message):
    __slots__ = ("placed", "refused", "failed", "fleet", "queued", "progress", "suspect", "epoch")
    PLACED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    FLEET_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    SUSPECT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    placed: Placed
    refused: Refused
    failed: Failed
    fleet: Fleet
    queued: Queued
    progress: Progress
    suspect: Suspect
    epoch: int
    def __init__(self, placed: _Optional[_Union[Placed, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., fleet: _Optional[_Union[Fleet, _Mapping]] = ..., queued: _Optional[_Union[Queued, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., suspect: _Optional[_Union[Suspect, _Mapping]] = ..., epoch: _Optional[int] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("request_id", "prompt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt: PromptProgress
    def __init__(self, request_id: _Optional[str] = ..., prompt: _Optional[_Union[PromptProgress, _Mapping]] = ...) -> None: ...

class PromptProgress(_message.Message):
    __slots__ = ("state", "computed_tokens", "left_s", "queue_place")
    STATE_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_PLACE_FIELD_NUMBER: _ClassVar[int]
    state: RequestState
    computed_tokens: int
    left_s: float
    queue_place: int
    def __init__(self, state: _Optional[_Union[RequestState, str]] = ..., computed_tokens: _Optional[int] = ..., left_s: _Optional[float] = ..., queue_place: _Optional[int] = ...) -> None: ...

class Placed(_message.Message):
    __slots__ = ("request_id", "decode", "predicted_ttft_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    decode: Member
    predicted_ttft_s: float
    def __init__(self, request_id: _Optional[str] = ..., decode: _Optional[_Union[Member, _Mapping]] = ..., predicted_ttft_s: _Optional[float] = ...) -> None: ...

class Queued(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("request_id", "code", "message", "retry_after_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    code: RefusalCode
    message: str
    retry_after_s: float
    def __init__(self, request_id: _Optional[str] = ..., code: _Optional[_Union[RefusalCode, str]] = ..., message: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("request_id", "message", "resumable", "quarantined", "prompt_unread")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RESUMABLE_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_UNREAD_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    message: str
    resumable: bool
    quarantined: bool
    prompt_unread: bool
    def __init__(self, request_id: _Optional[str] = ..., message: _Optional[str] = ..., resumable: _Optional[bool] = ..., quarantined: _Optional[bool] = ..., prompt_unread: _Optional[bool] = ...) -> None: ...

class Suspect(_message.Message):
    __slots__ = ("request_id", "deaths")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DEATHS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    deaths: _containers.RepeatedCompositeFieldContainer[_common_pb2.Incarnation]
    def __init__(self, request_id: _Optional[str] = ..., deaths: _Optional[_Iterable[_Union[_common_pb2.Incarnation, _Mapping]]] = ...) -> None: ...

class Fleet(_message.Message):
    __slots__ = ("decode", "ready", "lease", "prefill")
    DECODE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    decode: _containers.RepeatedCompositeFieldContainer[Member]
    ready: bool
    lease: str
    prefill: _containers.RepeatedCompositeFieldContainer[Member]
    def __init__(self, decode: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., ready: _Optional[bool] = ..., lease: _Optional[str] = ..., prefill: _Optional[_Iterable[_Union[Member, _Mapping]]] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("incarnation", "address")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    incarnation: _common_pb2.Incarnation
    address: str
    def __init__(self, incarnation: _Optional[_Union[_common_pb2.Incarnation, _Mapping]] = ..., address: _Optional[str] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("register", "heartbeat", "chunk_started", "chunk_finished", "request_released", "decode_started", "request_finished", "request_failed", "draining", "chunk_suspended", "prefix_landed", "first_token_sent", "prompt_advanced", "cached_blocks", "seen_epoch")
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_STARTED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FINISHED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_RELEASED_FIELD_NUMBER: _ClassVar[int]
    DECODE_STARTED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FINISHED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FAILED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    CHUNK_SUSPENDED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_LANDED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_SENT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ADVANCED_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SEEN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    register: Register
    heartbeat: Heartbeat
    chunk_started: ChunkStarted
    chunk_finished: ChunkFinished
    request_released: RequestReleased
    decode_started: DecodeStarted
    request_finished: RequestFinished
    request_failed: RequestFailed
    draining: Draining
    chunk_suspended: ChunkSuspended
    prefix_landed: PrefixLanded
    first_token_sent: FirstTokenSent
    prompt_advanced: PromptAdvanced
    cached_blocks: CachedBlocks
    seen_epoch: int
    def __init__(self, register: _Optional[_Union[Register, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., chunk_started: _Optional[_Union[ChunkStarted, _Mapping]] = ..., chunk_finished: _Optional[_Union[ChunkFinished, _Mapping]] = ..., request_released: _Optional[_Union[RequestReleased, _Mapping]] = ..., decode_started: _Optional[_Union[DecodeStarted, _Mapping]] = ..., request_finished: _Optional[_Union[RequestFinished, _Mapping]] = ..., request_failed: _Optional[_Union[RequestFailed, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., chunk_suspended: _Optional[_Union[ChunkSuspended, _Mapping]] = ..., prefix_landed: _Optional[_Union[PrefixLanded, _Mapping]] = ..., first_token_sent: _Optional[_Union[FirstTokenSent, _Mapping]] = ..., prompt_advanced: _Optional[_Union[PromptAdvanced, _Mapping]] = ..., cached_blocks: _Optional[_Union[CachedBlocks, _Mapping]] = ..., seen_epoch: _Optional[int] = ...) -> None: ...

class Register(_message.Message):
    __slots__ = ("incarnation", "role", "address", "model_hash", "kv_pages", "page_tokens", "max_context_tokens", "max_batch", "latency", "node", "kv_layers", "decode_step", "block_tokens", "held", "adaptive_chunks")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    KV_PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_FIELD_NUMBER: _ClassVar[int]
    LATENCY_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    KV_LAYERS_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    ADAPTIVE_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    incarnation: _common_pb2.Incarnation
    role: Role
    address: str
    model_hash: str
    kv_pages: int
    page_tokens: int
    max_context_tokens: int
    max_batch: int
    latency: SpLatency
    node: str
    kv_layers: int
    decode_step: DecodeStepTime
    block_tokens: int
    held: _containers.RepeatedCompositeFieldContainer[Held]
    adaptive_chunks: bool
    def __init__(self, incarnation: _Optional[_Union[_common_pb2.Incarnation, _Mapping]] = ..., role: _Optional[_Union[Role, str]] = ..., address: _Optional[str] = ..., model_hash: _Optional[str] = ..., kv_pages: _Optional[int] = ..., page_tokens: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., max_batch: _Optional[int] = ..., latency: _Optional[_Union[SpLatency, _Mapping]] = ..., node: _Optional[str] = ..., kv_layers: _Optional[int] = ..., decode_step: _Optional[_Union[DecodeStepTime, _Mapping]] = ..., block_tokens: _Optional[int] = ..., held: _Optional[_Iterable[_Union[Held, _Mapping]]] = ..., adaptive_chunks: _Optional[bool] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("request_id", "prompt_tokens", "max_new_tokens", "choices", "attempt", "chunks", "chunks_done", "computing", "compute_s", "decode", "shards", "kept_tokens", "landed_tokens", "first_token", "decoding", "failed", "leaving", "complete")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_DONE_FIELD_NUMBER: _ClassVar[int]
    COMPUTING_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LANDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DECODING_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_tokens: int
    max_new_tokens: int
    choices: int
    attempt: int
    chunks: _containers.RepeatedCompositeFieldContainer[Chunk]
    chunks_done: int
    computing: bool
    compute_s: float
    decode: _common_pb2.Incarnation
    shards: _containers.RepeatedCompositeFieldContainer[HeldShard]
    kept_tokens: int
    landed_tokens: int
    first_token: bool
    decoding: bool
    failed: bool
    leaving: bool
    complete: bool
    def __init__(self, request_id: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., choices: _Optional[int] = ..., attempt: _Optional[int] = ..., chunks: _Optional[_Iterable[_Union[Chunk, _Mapping]]] = ..., chunks_done: _Optional[int] = ..., computing: _Optional[bool] = ..., compute_s: _Optional[float] = ..., decode: _Optional[_Union[_common_pb2.Incarnation, _Mapping]] = ..., shards: _Optional[_Iterable[_Union[HeldShard, _Mapping]]] = ..., kept_tokens: _Optional[int] = ..., landed_tokens: _Optional[int] = ..., first_token: _Optional[bool] = ..., decoding: _Optional[bool] = ..., failed: _Optional[bool] = ..., leaving: _Optional[bool] = ..., complete: _Optional[bool] = ...) -> None: ...

class HeldShard(_message.Message):
    __slots__ = ("worker_id", "start_token", "end_token")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    START_TOKEN_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    start_token: int
    end_token: int
    def __init__(self, worker_id: _Optional[str] = ..., start_token: _Optional[int] = ..., end_token: _Optional[int] = ...) -> None: ...

class DecodeStepTime(_message.Message):
    __slots__ = ("base_s", "per_sequence_s", "per_context_token_s")
    BASE_S_FIELD_NUMBER: _ClassVar[int]
    PER_SEQUENCE_S_FIELD_NUMBER: _ClassVar[int]
    PER_CONTEXT_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    base_s: float
    per_sequence_s: float
    per_context_token_s: float
    def __init__(self, base_s: _Optional[float] = ..., per_sequence_s: _Optional[float] = ..., per_context_token_s: _Optional[float] = ...) -> None: ...

class SpLatency(_message.Message):
    __slots__ = ("by_sp",)
    class BySpEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: Latency
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[Latency, _Mapping]] = ...) -> None: ...
    BY_SP_FIELD_NUMBER: _ClassVar[int]
    by_sp: _containers.MessageMap[int, Latency]
    def __init__(self, by_sp: _Optional[_Mapping[int, Latency]] = ...) -> None: ...

class Latency(_message.Message):
    __slots__ = ("a", "b", "c", "d", "points")
    A_FIELD_NUMBER: _ClassVar[int]
    B_FIELD_NUMBER: _ClassVar[int]
    C_FIELD_NUMBER: _ClassVar[int]
    D_FIELD_NUMBER: _ClassVar[int]
    POINTS_FIELD_NUMBER: _ClassVar[int]
    a: float
    b: float
    c: float
    d: float
    points: _containers.RepeatedCompositeFieldContainer[LatencyPoint]
    def __init__(self, a: _Optional[float] = ..., b: _Optional[float] = ..., c: _Optional[float] = ..., d: _Optional[float] = ..., points: _Optional[_Iterable[_Union[LatencyPoint, _Mapping]]] = ...) -> None: ...

class LatencyPoint(_message.Message):
    __slots__ = ("tokens", "seconds")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    seconds: float
    def __init__(self, tokens: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("free_pages", "running", "waiting", "tbt_s", "standstill")
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    TBT_S_FIELD_NUMBER: _ClassVar[int]
    STANDSTILL_FIELD_NUMBER: _ClassVar[int]
    free_pages: int
    running: int
    waiting: int
    tbt_s: float
    standstill: Standstill
    def __init__(self, free_pages: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., tbt_s: _Optional[float] = ..., standstill: _Optional[_Union[Standstill, _Mapping]] = ...) -> None: ...

class Standstill(_message.Message):
    __slots__ = ("prepared", "claimed", "waits_for")
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    prepared: _containers.RepeatedScalarFieldContainer[str]
    claimed: str
    waits_for: str
    def __init__(self, prepared: _Optional[_Iterable[str]] = ..., claimed: _Optional[str] = ..., waits_for: _Optional[str] = ...) -> None: ...

class CachedBlocks(_message.Message):
    __slots__ = ("whole", "added", "removed")
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    whole: bool
    added: _containers.RepeatedScalarFieldContainer[int]
    removed: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, whole: _Optional[bool] = ..., added: _Optional[_Iterable[int]] = ..., removed: _Optional[_Iterable[int]] = ...) -> None: ...

class ChunkStarted(_message.Message):
    __slots__ = ("request_id", "chunk_index")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_INDEX_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    chunk_index: int
    def __init__(self, request_id: _Optional[str] = ..., chunk_index: _Optional[int] = ...) -> None: ...

class ChunkFinished(_message.Message):
    __slots__ = ("request_id", "chunk_index", "compute_s", "last", "ring_wait_s", "history_wait_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_INDEX_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    RING_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    HISTORY_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    chunk_index: int
    compute_s: float
    last: bool
    ring_wait_s: float
    history_wait_s: float
    def __init__(self, request_id: _Optional[str] = ..., chunk_index: _Optional[int] = ..., compute_s: _Optional[float] = ..., last: _Optional[bool] = ..., ring_wait_s: _Optional[float] = ..., history_wait_s: _Optional[float] = ...) -> None: ...

class ChunkSuspended(_message.Message):
    __slots__ = ("request_id", "chunk_index", "compute_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_INDEX_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    chunk_index: int
    compute_s: float
    def __init__(self, request_id: _Optional[str] = ..., chunk_index: _Optional[int] = ..., compute_s: _Optional[float] = ...) -> None: ...

class RequestReleased(_message.Message):
    __slots__ = ("request_id", "complete", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    complete: bool
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., complete: _Optional[bool] = ..., attempt: _Optional[int] = ...) -> None: ...

class PrefixLanded(_message.Message):
    __slots__ = ("request_id", "attempt", "tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    tokens: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class PromptAdvanced(_message.Message):
    __slots__ = ("request_id", "attempt", "tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    tokens: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class FirstTokenSent(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class DecodeStarted(_message.Message):
    __slots__ = ("request_id", "since_token_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SINCE_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    since_token_s: float
    def __init__(self, request_id: _Optional[str] = ..., since_token_s: _Optional[float] = ...) -> None: ...

class RequestFinished(_message.Message):
    __slots__ = ("request_id", "reason", "generated_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reason: _common_pb2.FinishReason
    generated_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., generated_tokens: _Optional[int] = ...) -> None: ...

class RequestFailed(_message.Message):
    __slots__ = ("request_id", "message", "retryable", "attempt", "kept_tokens", "prompt_unread", "fault")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_UNREAD_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    message: str
    retryable: bool
    attempt: int
    kept_tokens: int
    prompt_unread: bool
    fault: Fault
    def __init__(self, request_id: _Optional[str] = ..., message: _Optional[str] = ..., retryable: _Optional[bool] = ..., attempt: _Optional[int] = ..., kept_tokens: _Optional[int] = ..., prompt_unread: _Optional[bool] = ..., fault: _Optional[_Union[Fault, str]] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerCommand(_message.Message):
    __slots__ = ("registered", "run_prefill", "admit_decode", "cancel", "drain", "order", "policy", "keep_traces", "epoch")
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    RUN_PREFILL_FIELD_NUMBER: _ClassVar[int]
    ADMIT_DECODE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    KEEP_TRACES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    registered: Registered
    run_prefill: RunPrefill
    admit_decode: AdmitDecode
    cancel: CancelRequest
    drain: Drain
    order: Order
    policy: PolicyInForce
    keep_traces: KeepTraces
    epoch: int
    def __init__(self, registered: _Optional[_Union[Registered, _Mapping]] = ..., run_prefill: _Optional[_Union[RunPrefill, _Mapping]] = ..., admit_decode: _Optional[_Union[AdmitDecode, _Mapping]] = ..., cancel: _Optional[_Union[CancelRequest, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., order: _Optional[_Union[Order, _Mapping]] = ..., policy: _Optional[_Union[PolicyInForce, _Mapping]] = ..., keep_traces: _Optional[_Union[KeepTraces, _Mapping]] = ..., epoch: _Optional[int] = ...) -> None: ...

class Registered(_message.Message):
    __slots__ = ("heartbeat_s", "preemption", "policy", "weights", "lease")
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    PREEMPTION_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    heartbeat_s: float
    preemption: Preemption
    policy: str
    weights: Weights
    lease: str
    def __init__(self, heartbeat_s: _Optional[float] = ..., preemption: _Optional[_Union[Preemption, str]] = ..., policy: _Optional[str] = ..., weights: _Optional[_Union[Weights, _Mapping]] = ..., lease: _Optional[str] = ...) -> None: ...

class PolicyInForce(_message.Message):
    __slots__ = ("name", "weights")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    weights: Weights
    def __init__(self, name: _Optional[str] = ..., weights: _Optional[_Union[Weights, _Mapping]] = ...) -> None: ...

class Weights(_message.Message):
    __slots__ = ("classes", "tenants")
    class ClassesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class TenantsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    classes: _containers.ScalarMap[str, float]
    tenants: _containers.ScalarMap[str, float]
    def __init__(self, classes: _Optional[_Mapping[str, float]] = ..., tenants: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("index", "start_token", "num_tokens", "instance_ids")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    START_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_IDS_FIELD_NUMBER: _ClassVar[int]
    index: int
    start_token: int
    num_tokens: int
    instance_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, index: _Optional[int] = ..., start_token: _Optional[int] = ..., num_tokens: _Optional[int] = ..., instance_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class RunPrefill(_message.Message):
    __slots__ = ("request", "chunks", "decode", "attempt", "group", "shards")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    request: _common_pb2.RequestSpec
    chunks: _containers.RepeatedCompositeFieldContainer[Chunk]
    decode: Member
    attempt: int
    group: _containers.RepeatedCompositeFieldContainer[Member]
    shards: _containers.RepeatedCompositeFieldContainer[KvShard]
    def __init__(self, request: _Optional[_Union[_common_pb2.RequestSpec, _Mapping]] = ..., chunks: _Optional[_Iterable[_Union[Chunk, _Mapping]]] = ..., decode: _Optional[_Union[Member, _Mapping]] = ..., attempt: _Optional[int] = ..., group: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., shards: _Optional[_Iterable[_Union[KvShard, _Mapping]]] = ...) -> None: ...

class KvShard(_message.Message):
    __slots__ = ("worker", "start_token", "end_token")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    START_TOKEN_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_FIELD_NUMBER: _ClassVar[int]
    worker: Member
    start_token: int
    end_token: int
    def __init__(self, worker: _Optional[_Union[Member, _Mapping]] = ..., start_token: _Optional[int] = ..., end_token: _Optional[int] = ...) -> None: ...

class Order(_message.Message):
    __slots__ = ("queue",)
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    queue: _containers.RepeatedCompositeFieldContainer[QueueEntry]
    def __init__(self, queue: _Optional[_Iterable[_Union[QueueEntry, _Mapping]]] = ...) -> None: ...

class QueueEntry(_message.Message):
    __slots__ = ("chunks",)
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkRef]
    def __init__(self, chunks: _Optional[_Iterable[_Union[ChunkRef, _Mapping]]] = ...) -> None: ...

class ChunkRef(_message.Message):
    __slots__ = ("request_id", "chunk_index")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_INDEX_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    chunk_index: int
    def __init__(self, request_id: _Optional[str] = ..., chunk_index: _Optional[int] = ...) -> None: ...

class AdmitDecode(_message.Message):
    __slots__ = ("request", "attempt", "kept_tokens", "shards", "expected_tokens")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request: _common_pb2.RequestSpec
    attempt: int
    kept_tokens: int
    shards: _containers.RepeatedCompositeFieldContainer[KvShard]
    expected_tokens: float
    def __init__(self, request: _Optional[_Union[_common_pb2.RequestSpec, _Mapping]] = ..., attempt: _Optional[int] = ..., kept_tokens: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[KvShard, _Mapping]]] = ..., expected_tokens: _Optional[float] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("abort",)
    ABORT_FIELD_NUMBER: _ClassVar[int]
    abort: bool
    def __init__(self, abort: _Optional[bool] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InstanceStatus(_message.Message):
    __slots__ = ("incarnation", "role", "address", "draining", "free_pages", "total_pages", "running", "waiting", "queue_s", "held_requests", "breaker", "slowness")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    HELD_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    BREAKER_FIELD_NUMBER: _ClassVar[int]
    SLOWNESS_FIELD_NUMBER: _ClassVar[int]
    incarnation: _common_pb2.Incarnation
    role: Role
    address: str
    draining: bool
    free_pages: int
    total_pages: int
    running: int
    waiting: int
    queue_s: float
    held_requests: int
    breaker: Breaker
    slowness: Breaker
    def __init__(self, incarnation: _Optional[_Union[_common_pb2.Incarnation, _Mapping]] = ..., role: _Optional[_Union[Role, str]] = ..., address: _Optional[str] = ..., draining: _Optional[bool] = ..., free_pages: _Optional[int] = ..., total_pages: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., queue_s: _Optional[float] = ..., held_requests: _Optional[int] = ..., breaker: _Optional[_Union[Breaker, str]] = ..., slowness: _Optional[_Union[Breaker, str]] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("instances", "queued", "prefilling", "decoding", "policy", "preemption", "planner", "policies", "improvement_rate", "mechanisms", "weights")
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    PREFILLING_FIELD_NUMBER: _ClassVar[int]
    DECODING_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PREEMPTION_FIELD_NUMBER: _ClassVar[int]
    PLANNER_FIELD_NUMBER: _ClassVar[int]
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    IMPROVEMENT_RATE_FIELD_NUMBER: _ClassVar[int]
    MECHANISMS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    instances: _containers.RepeatedCompositeFieldContainer[InstanceStatus]
    queued: int
    prefilling: int
    decoding: int
    policy: str
    preemption: Preemption
    planner: str
    policies: _containers.RepeatedScalarFieldContainer[str]
    improvement_rate: float
    mechanisms: _containers.RepeatedCompositeFieldContainer[Mechanism]
    weights: Weights
    def __init__(self, instances: _Optional[_Iterable[_Union[InstanceStatus, _Mapping]]] = ..., queued: _Optional[int] = ..., prefilling: _Optional[int] = ..., decoding: _Optional[int] = ..., policy: _Optional[str] = ..., preemption: _Optional[_Union[Preemption, str]] = ..., planner: _Optional[str] = ..., policies: _Optional[_Iterable[str]] = ..., improvement_rate: _Optional[float] = ..., mechanisms: _Optional[_Iterable[_Union[Mechanism, _Mapping]]] = ..., weights: _Optional[_Union[Weights, _Mapping]] = ...) -> None: ...

class Mechanism(_message.Message):
    __slots__ = ("name", "on", "detail")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    name: str
    on: bool
    detail: str
    def __init__(self, name: _Optional[str] = ..., on: _Optional[bool] = ..., detail: _Optional[str] = ...) -> None: ...

class SetPolicyRequest(_message.Message):
    __slots__ = ("policy", "weights")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    policy: str
    weights: Weights
    def __init__(self, policy: _Optional[str] = ..., weights: _Optional[_Union[Weights, _Mapping]] = ...) -> None: ...

class SetPolicyReply(_message.Message):
    __slots__ = ("before", "now", "weights")
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    before: str
    now: str
    weights: Weights
    def __init__(self, before: _Optional[str] = ..., now: _Optional[str] = ..., weights: _Optional[_Union[Weights, _Mapping]] = ...) -> None: ...

class SetImprovementRateRequest(_message.Message):
    __slots__ = ("rate", "rates")
    RATE_FIELD_NUMBER: _ClassVar[int]
    RATES_FIELD_NUMBER: _ClassVar[int]
    rate: float
    rates: str
    def __init__(self, rate: _Optional[float] = ..., rates: _Optional[str] = ...) -> None: ...

class SetImprovementRateReply(_message.Message):
    __slots__ = ("before", "now")
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    before: float
    now: float
    def __init__(self, before: _Optional[float] = ..., now: _Optional[float] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadReply(_message.Message):
    __slots__ = ("pools", "parked_requests")
    POOLS_FIELD_NUMBER: _ClassVar[int]
    PARKED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[PoolLoad]
    parked_requests: int
    def __init__(self, pools: _Optional[_Iterable[_Union[PoolLoad, _Mapping]]] = ..., parked_requests: _Optional[int] = ...) -> None: ...

class PoolLoad(_message.Message):
    __slots__ = ("role", "ready", "draining", "active_requests", "backlog_s", "arriving", "ttft_slo_ratio", "kv_utilisation", "tbt_slo_ratio", "contexts")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_S_FIELD_NUMBER: _ClassVar[int]
    ARRIVING_FIELD_NUMBER: _ClassVar[int]
    TTFT_SLO_RATIO_FIELD_NUMBER: _ClassVar[int]
    KV_UTILISATION_FIELD_NUMBER: _ClassVar[int]
    TBT_SLO_RATIO_FIELD_NUMBER: _ClassVar[int]
    CONTEXTS_FIELD_NUMBER: _ClassVar[int]
    role: Role
    ready: int
    draining: int
    active_requests: int
    backlog_s: float
    arriving: float
    ttft_slo_ratio: float
    kv_utilisation: float
    tbt_slo_ratio: float
    contexts: _containers.RepeatedCompositeFieldContainer[KvContext]
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., ready: _Optional[int] = ..., draining: _Optional[int] = ..., active_requests: _Optional[int] = ..., backlog_s: _Optional[float] = ..., arriving: _Optional[float] = ..., ttft_slo_ratio: _Optional[float] = ..., kv_utilisation: _Optional[float] = ..., tbt_slo_ratio: _Optional[float] = ..., contexts: _Optional[_Iterable[_Union[KvContext, _Mapping]]] = ...) -> None: ...

class KvContext(_message.Message):
    __slots__ = ("tokens", "final_tokens", "growth_tokens_s", "owner_tokens")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GROWTH_TOKENS_S_FIELD_NUMBER: _ClassVar[int]
    OWNER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    final_tokens: int
    growth_tokens_s: float
    owner_tokens: int
    def __init__(self, tokens: _Optional[int] = ..., final_tokens: _Optional[int] = ..., growth_tokens_s: _Optional[float] = ..., owner_tokens: _Optional[int] = ...) -> None: ...

class SetCordonRequest(_message.Message):
    __slots__ = ("instance_id", "cordoned")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    CORDONED_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    cordoned: bool
    def __init__(self, instance_id: _Optional[str] = ..., cordoned: _Optional[bool] = ...) -> None: ...

class SetCordonReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("instance_id", "abort")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    abort: bool
    def __init__(self, instance_id: _Optional[str] = ..., abort: _Optional[bool] = ...) -> None: ...

class EvictReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class Explanation(_message.Message):
    __slots__ = ("request_id", "state", "slo_class", "policy", "part", "key", "waits_for", "left_s", "deadline_in_s", "first_token_s", "in_time", "attainment", "value", "stretch", "ahead", "waited", "suspended_by", "before", "helps")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SLO_CLASS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_IN_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    IN_TIME_FIELD_NUMBER: _ClassVar[int]
    ATTAINMENT_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    STRETCH_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    WAITED_FIELD_NUMBER: _ClassVar[int]
    SUSPENDED_BY_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    HELPS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    state: str
    slo_class: str
    policy: str
    part: str
    key: str
    waits_for: str
    left_s: float
    deadline_in_s: float
    first_token_s: float
    in_time: bool
    attainment: float
    value: float
    stretch: float
    ahead: _containers.RepeatedCompositeFieldContainer[RequestsAhead]
    waited: _containers.RepeatedCompositeFieldContainer[Waited]
    suspended_by: _containers.RepeatedScalarFieldContainer[str]
    before: _containers.RepeatedCompositeFieldContainer[RequestBefore]
    helps: _containers.RepeatedCompositeFieldContainer[Help]
    def __init__(self, request_id: _Optional[str] = ..., state: _Optional[str] = ..., slo_class: _Optional[str] = ..., policy: _Optional[str] = ..., part: _Optional[str] = ..., key: _Optional[str] = ..., waits_for: _Optional[str] = ..., left_s: _Optional[float] = ..., deadline_in_s: _Optional[float] = ..., first_token_s: _Optional[float] = ..., in_time: _Optional[bool] = ..., attainment: _Optional[float] = ..., value: _Optional[float] = ..., stretch: _Optional[float] = ..., ahead: _Optional[_Iterable[_Union[RequestsAhead, _Mapping]]] = ..., waited: _Optional[_Iterable[_Union[Waited, _Mapping]]] = ..., suspended_by: _Optional[_Iterable[str]] = ..., before: _Optional[_Iterable[_Union[RequestBefore, _Mapping]]] = ..., helps: _Optional[_Iterable[_Union[Help, _Mapping]]] = ...) -> None: ...

class RequestBefore(_message.Message):
    __slots__ = ("request_id", "part", "key", "seconds")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    part: str
    key: str
    seconds: float
    def __init__(self, request_id: _Optional[str] = ..., part: _Optional[str] = ..., key: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class Help(_message.Message):
    __slots__ = ("what", "saves_s")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    SAVES_S_FIELD_NUMBER: _ClassVar[int]
    what: str
    saves_s: float
    def __init__(self, what: _Optional[str] = ..., saves_s: _Optional[float] = ...) -> None: ...

class RequestsAhead(_message.Message):
    __slots__ = ("part", "requests", "seconds")
    PART_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    part: str
    requests: int
    seconds: float
    def __init__(self, part: _Optional[str] = ..., requests: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class Waited(_message.Message):
    __slots__ = ("reason", "part", "seconds")
    REASON_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    part: str
    seconds: float
    def __init__(self, reason: _Optional[str] = ..., part: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class WatchBoardRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BoardLines(_message.Message):
    __slots__ = ("lines",)
    LINES_FIELD_NUMBER: _ClassVar[int]
    lines: bytes
    def __init__(self, lines: _Optional[bytes] = ...) -> None: ...
