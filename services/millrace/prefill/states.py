"""The states of a request at a prefill instance, and the table of the legal steps between them."""

from __future__ import annotations

from enum import Enum
from types import MappingProxyType


class PrefillState(Enum):
    """The progress of one attempt at a request, at one instance."""

    PREPARING = "preparing"  # reads its prompt, takes pages, opens its transfer, joins its group
    WAITING = "waiting"  # prepared; nothing of it has been computed
    COMPUTING = "computing"
    PREEMPTED = "preempted"  # another task computes
    LATER_STAGES = "later_stages"  # its pass is in later stages; the first stage has no work
    BETWEEN_CHUNKS = "between_chunks"  # a chunk is computed; the next one waits for its turn
    SENDING = "sending"  # all chunks are computed; the transfer and the results are on their way
    CANCELLED = "cancelled"  # nobody wants its result; the instance still holds it
    FAILED = "failed"  # it can't be computed or sent; the instance still holds it
    RELEASED = "released"  # the instance holds nothing of it


class PrefillEvent(Enum):
    """The events of one attempt at a request, at one instance."""

    READY = "ready"
    START = "start"  # or continue after a suspension
    PREEMPT = "preempt"
    HAND_ON = "hand_on"  # to the later stages
    END_CHUNK = "end_chunk"
    END_COMPUTE = "end_compute"
    CANCEL = "cancel"
    FAIL = "fail"
    RELEASE = "release"


_S, _E = PrefillState, PrefillEvent
_WANTED = tuple(_S)[: tuple(_S).index(_S.CANCELLED)]
_UNWANTED = (_S.CANCELLED, _S.FAILED)
_OF_COMPUTE = (_E.READY, _E.START, _E.PREEMPT, _E.HAND_ON, _E.END_CHUNK, _E.END_COMPUTE)

#: Every legal step: (state, event) -> the state after it.
#: The event loop cancels and fails a request while the compute thread works on it. So an unwanted
#: request may still start, stop and end until the compute thread sees that it is unwanted; these
#: events change nothing. A cancel that follows a failure counts: nobody hears of the failure.
TRANSITIONS: MappingProxyType[tuple[PrefillState, PrefillEvent], PrefillState] = MappingProxyType(
    {
        (_S.PREPARING, _E.READY): _S.WAITING,
        (_S.WAITING, _E.START): _S.COMPUTING,
        (_S.COMPUTING, _E.PREEMPT): _S.PREEMPTED,
        (_S.COMPUTING, _E.HAND_ON): _S.LATER_STAGES,
        (_S.COMPUTING, _E.END_CHUNK): _S.BETWEEN_CHUNKS,
        (_S.PREEMPTED, _E.START): _S.COMPUTING,
        (_S.LATER_STAGES, _E.START): _S.COMPUTING,
        (_S.BETWEEN_CHUNKS, _E.START): _S.COMPUTING,
        (_S.BETWEEN_CHUNKS, _E.END_COMPUTE): _S.SENDING,
        (_S.SENDING, _E.RELEASE): _S.RELEASED,
    }
    | {(state, _E.CANCEL): _S.CANCELLED for state in (*_WANTED, *_UNWANTED)}
    | {(state, _E.FAIL): _S.FAILED for state in (*_WANTED, _S.FAILED)}
    | {(_S.CANCELLED, _E.FAIL): _S.CANCELLED}
    | {(state, _E.RELEASE): _S.RELEASED for state in _UNWANTED}
    | {(state, event): state for state in _UNWANTED for event in _OF_COMPUTE}
)
