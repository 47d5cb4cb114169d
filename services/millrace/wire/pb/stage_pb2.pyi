from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToStage(_message.Message):
    __slots__ = ("begin", "frame")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    begin: BeginStage
    frame: StageFrame
    def __init__(self, begin: _Optional[_Union[BeginStage, _Mapping]] = ..., frame: _Optional[_Union[StageFrame, _Mapping]] = ...) -> None: ...

class BeginStage(_message.Message):
    __slots__ = ("instance", "model_hash", "load_format", "place", "beside", "version")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    LOAD_FORMAT_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    BESIDE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    instance: str
    model_hash: str
    load_format: str
    place: bytes
    beside: _containers.RepeatedScalarFieldContainer[str]
    version: str
    def __init__(self, instance: _Optional[str] = ..., model_hash: _Optional[str] = ..., load_format: _Optional[str] = ..., place: _Optional[bytes] = ..., beside: _Optional[_Iterable[str]] = ..., version: _Optional[str] = ...) -> None: ...

class StageFrame(_message.Message):
    __slots__ = ("channel", "message")
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    channel: int
    message: bytes
    def __init__(self, channel: _Optional[int] = ..., message: _Optional[bytes] = ...) -> None: ...

class FromStage(_message.Message):
    __slots__ = ("begun", "frame", "ended")
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    begun: StageBegun
    frame: StageFrame
    ended: StageEnded
    def __init__(self, begun: _Optional[_Union[StageBegun, _Mapping]] = ..., frame: _Optional[_Union[StageFrame, _Mapping]] = ..., ended: _Optional[_Union[StageEnded, _Mapping]] = ...) -> None: ...

class StageBegun(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StageEnded(_message.Message):
    __slots__ = ("how",)
    HOW_FIELD_NUMBER: _ClassVar[int]
    how: str
    def __init__(self, how: _Optional[str] = ...) -> None: ...
