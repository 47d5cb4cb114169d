"""How the members of a gang start, stop and go on together (FlowPrefill section 5.1).

A gang is a task that several instances compute at once: a chunk on a group. Inside an operator the
members wait for each other's keys and values, so they must all run it or none. One that stopped
before an operator that another has begun would leave the other waiting for ever. Nobody may run
anything else from the gang's start to its stop.

A task is a row of operators, the same at every member; position p lies before operator p. The
first member leads. What members say to each other arrives in order:

- Start. A member whose instance has nothing to run before the gang says READY and keeps itself
  free. When all are, the leader says START. A member that is to run something else meanwhile says
  WITHDRAW and waits for the leader's word: RELEASE, or the START that was on its way. Rounds are
  counted, so that a READY which crossed a START is not taken for one of the next round.
- Stop. A member that is to run something else says STOP and runs on. The leader says HOLD: nobody
  begins another operator, and each answers at once HELD with the operators that it has begun, which
  run on to their ends. The leader agrees the first position that nobody is past and where all may
  stop, and says GO_TO. All run up to there and leave the task, or to its end where there is no such
  position. Once said, a stop happens; a gang that comes first again starts again.

The paper has ranks under tensor parallelism suspend only at the same value of a synchronised
counter. The usual way to agree on it, the proposer's own count plus one, would leave behind a rank
that is further on; here the counts are collected first.

A member that drops the task says nothing: whoever asks it hears that it has not got the task, and
the scheduler cancels it everywhere. No member ever decides by the time that passed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from typing import Final, NamedTuple

from millrace.core.errors import IntegrityError, TransferError
from millrace.core.stop_point import StopPoint

#: First byte of a notification, by which a transport tells its subscribers apart.
CHANNEL: Final = 4

#: The position of a member that has not got the task any more: behind every end.
GONE: Final = 2**32 - 1


class GangKey(NamedTuple):
    """One attempt at a chunk of a request."""

    request_id: str
    attempt: int
    chunk_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GangSpec:
    """A task as one of its members sees it. All but `me` is the same at every member.

    ``stops[p]``: the `StopPoint` that ends right before operator p; the task has as many operators
    (PASS at 0, where nothing is held). ``last_stop``: no stop is agreed at a later position.
    Raises ValueError where these contradict each other.
    """

    key: GangKey
    members: tuple[str, ...]  # leader first
    me: str
    stops: bytes
    last_stop: int

    def __post_init__(self) -> None:
        if self.me not in self.members or len(set(self.members)) != len(self.members):
            raise ValueError(f"members {self.members} must differ and include {self.me!r}")
        if not 0 <= self.last_stop < len(self.stops):
            raise ValueError(f"last_stop {self.last_stop} is none of {len(self.stops)} positions")

    @property
    def leader(self) -> str:
        return self.members[0]

    @property
    def others(self) -> tuple[str, ...]:
        return tuple(member for member in self.members if member != self.me)

    def check(self, position: int, ended: StopPoint) -> None:
        """Raises IntegrityError unless `ended` is what ends at the position."""
        found = StopPoint(self.stops[position]).name if position < len(self.stops) else "nothing"
        if found != ended.name:
            raise IntegrityError(
                f"{ended.name} ends before operator {position} of {self.key}; stops say {found}"
            )

    def stop_from(self, begun: int, finest: StopPoint) -> int:
        """The first position from `begun` on where at least `finest` ends; else the task's end."""
        allowed = (p for p in range(begun, self.last_stop + 1) if self.stops[p] >= finest)
        return next(allowed, len(self.stops))


class Word(IntEnum):
    """What a message says. `value` in brackets."""

    READY = 1  # to the leader: nothing comes before the gang here [rounds so far]
    WITHDRAW = 2  # to the leader: something does, may it run? [rounds so far]
    STOP = 3  # to the leader: something comes before the gang, which runs
    HELD = 4  # to the leader: I begin nothing more [operators begun], and where I may stop
    CALL = 5  # to a member: the leader has the task; say READY again if you are
    START = 6  # to a member: all are ready
    RELEASE = 7  # to a member: you are free
    HOLD = 8  # to a member: begin nothing more, and say HELD
    GO_TO = 9  # to a member: run up to there and stop [position]


# channel u8, word u8, finest u8, attempt u32, chunk u32, value u32; then the request's id
_HEADER = struct.Struct("<BBBIII")


@dataclass(frozen=True, slots=True)
class Message:
    """What one member says to another."""

    key: GangKey
    word: Word
    value: int = 0
    finest: StopPoint = StopPoint.OPERATOR

    def encode(self) -> bytes:
        request_id, attempt, chunk_index = self.key
        header = _HEADER.pack(CHANNEL, self.word, self.finest, attempt, chunk_index, self.value)
        return header + request_id.encode()

    @staticmethod
    def decode(payload: bytes) -> Message:
        """Raises TransferError for bytes that `encode` can't have made."""
        try:
            channel, word, finest, attempt, chunk_index, value = _HEADER.unpack_from(payload)
            if channel != CHANNEL:
                raise ValueError(f"channel {channel}")
            key = GangKey(payload[_HEADER.size :].decode(), attempt, chunk_index)
            return Message(key, Word(word), value, StopPoint(finest))
        except (struct.error, ValueError) as error:
            raise TransferError(f"not a gang's message: {error}") from error


class State(Enum):
    """Of a member."""

    AWAY = auto()  # it may run anything else
    READY = auto()  # it waits for START
    WITHDRAWN = auto()  # it waits for RELEASE or START
    RUNNING = auto()
    HOLDING = auto()  # what it has begun runs on; it waits for GO_TO


class Step(Enum):
    """What a member is to do before an operator."""

    BEGIN = auto()
    WAIT = auto()
    STOP = auto()


@dataclass(slots=True, eq=False)
class Gang:
    """One member's part in the protocol; at the leader, the leader's too.

    `say(to, message)` takes what is to be sent. `finest` is asked where this member may stop.
    """

    spec: GangSpec
    say: Callable[[str, Message], None]
    finest: Callable[[], StopPoint]
    state: State = State.AWAY
    begun: int = 0  # operators, in all rounds
    rounds: int = 0  # starts so far
    stop_at: int | None = None  # as agreed in this round
    _asked: bool = False  # for a stop, in this round
    _ready: set[str] = field(default_factory=set)  # the leader's, as of this round
    _held: dict[str, Message] = field(default_factory=dict)  # the leader's

    @property
    def has_started(self) -> bool:
        return self.state in (State.RUNNING, State.HOLDING)

    def call(self) -> None:
        """The task is here now. Others that were ready before the leader had it say so again."""
        if self.spec.me == self.spec.leader:
            self._say_all(Word.CALL)

    def be_ready(self) -> None:
        """Nothing comes before the gang here; nothing else runs here until it is `AWAY` again."""
        self.state = State.READY
        self._to_leader(Word.READY, self.rounds)

    def withdraw(self) -> None:
        """Something comes before the gang, for which this member has been ready."""
        if self.spec.me == self.spec.leader:
            self.state = State.AWAY
            self._ready.discard(self.spec.me)
        else:
            self.state = State.WITHDRAWN
            self._to_leader(Word.WITHDRAW, self.rounds)

    def ask_stop(self) -> None:
        """Something comes before the gang, which has started."""
        if self.state is State.RUNNING and self.stop_at is None and not self._asked:
            self._asked = True
            self._to_leader(Word.STOP)

    def begin(self) -> Step:
        """Asked before each operator, and again after a WAIT whenever something was heard."""
        if self.begun == self.stop_at:
            return Step.STOP
        if self.state is State.HOLDING:
            return Step.WAIT
        self.begun += 1
        return Step.BEGIN

    def leave(self) -> None:
        """This member has stopped as agreed."""
        self.state = State.AWAY

    def hear(self, sender: str, message: Message) -> None:
        """Takes in what a member says."""
        match message.word:
            case Word.READY if message.value == self.rounds:
                self._ready.add(sender)
                self._start_if_all_ready()
            case Word.WITHDRAW if message.value == self.rounds:
                self._ready.discard(sender)
                self._say(sender, Word.RELEASE)
            case Word.STOP:
                self._hold_all()
            case Word.HELD if self.state is State.HOLDING:
                self._held[sender] = message
                self._agree_if_all_held()
            case Word.CALL if self.state is State.READY:
                self._to_leader(Word.READY, self.rounds)
            case Word.START if self.state in (State.READY, State.WITHDRAWN):
                self._start()
            case Word.RELEASE if self.state is State.WITHDRAWN:
                self.state = State.AWAY
            case Word.HOLD if self.state is State.RUNNING:
                self.state = State.HOLDING
                self._to_leader(Word.HELD, self.begun)
            case Word.GO_TO if self.state is State.HOLDING:
                self._go_to(message.value)
            case _:
                pass  # it crossed something that made it void

    # -- every member

    def _start(self) -> None:
        self.state = State.RUNNING
        self.rounds += 1
        self.stop_at, self._asked = None, False

    def _go_to(self, position: int) -> None:
        self.state = State.RUNNING
        self.stop_at = position

    # -- the leader

    def _start_if_all_ready(self) -> None:
        if len(self._ready) == len(self.spec.members):
            self._ready.clear()
            self._say_all(Word.START)
            self._start()

    def _hold_all(self) -> None:
        if self.state is not State.RUNNING or self.stop_at is not None:
            return  # it is being agreed, or was
        if self.spec.stop_from(self.begun, self.finest()) == len(self.spec.stops):
            return  # too late, or not here
        self._held.clear()
        self._say_all(Word.HOLD)
        self.state = State.HOLDING
        self._to_leader(Word.HELD, self.begun)

    def _agree_if_all_held(self) -> None:
        if len(self._held) == len(self.spec.members):
            begun = max(held.value for held in self._held.values())
            finest = max(held.finest for held in self._held.values())
            position = self.spec.stop_from(begun, finest)
            self._say_all(Word.GO_TO, position)
            self._go_to(position)

    # -- messages

    def _to_leader(self, word: Word, value: int = 0) -> None:
        finest = self.finest() if word is Word.HELD else StopPoint.OPERATOR
        message = Message(self.spec.key, word, value, finest)
        if self.spec.me == self.spec.leader:
            self.hear(self.spec.me, message)
        else:
            self.say(self.spec.leader, message)

    def _say(self, to: str, word: Word, value: int = 0) -> None:
        self.say(to, Message(self.spec.key, word, value))

    def _say_all(self, word: Word, value: int = 0) -> None:
        for member in self.spec.others:
            self._say(member, word, value)


def answer_without_task(message: Message) -> Message | None:
    """What one without the task (yet, or any more) says to those that wait for its word."""
    match message.word:
        case Word.WITHDRAW:
            return Message(message.key, Word.RELEASE)
        case Word.HOLD:
            return Message(message.key, Word.HELD, GONE)
        case _:
            return None
