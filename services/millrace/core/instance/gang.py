"""The protocol by which the members of a gang start, stop and resume together (FlowPrefill 5.1).

A gang is a task that several instances compute at once: a chunk on a group. Inside an operator the
members wait for each other's keys and values, so they must all run it or none. A member that stops
before an operator which another member has begun would leave that member waiting for ever. No
member may run anything else from the gang's start to its stop.

A task is a row of operators, the same at every member; position p lies before operator p. The
first member leads. Messages between two members arrive in order. A member hears nothing from an
instance that it is not linked to yet; it is linked to all members when it gets the task.

- Open. Members get the task at different times. A member that gets it says HERE to the leader; the
  leader, when it gets the task, says CALL, and the members that have the task say HERE again: a
  HERE that came too early for the leader was lost. When all members have said HERE, the leader says
  OPEN. Before OPEN a gang does not exist for the rule that picks tasks: it delays nothing. After
  OPEN all members hear each other, so no message below is lost.
- Start. A member whose instance has nothing to run before the gang says READY and keeps itself
  free. When all are ready, the leader says START. A member that is to run something else meanwhile
  says WITHDRAW and waits for the leader's answer: RELEASE, or the START that was on its way.
- Stop. A member that is to run something else says STOP and runs on. The leader says HOLD: no
  member begins another operator, and each answers at once HELD with the operators that it has
  begun, which run to their ends. The leader picks the first position that no member is past and
  where all may stop, and says GO_TO. All run up to there and leave the task, or to its end where
  there is no such position. An agreed stop happens; a gang that comes first again starts again.

The paper has ranks under tensor parallelism suspend only at the same value of a synchronised
counter. The usual way to agree on it, the proposer's own count plus one, would miss a rank
that is further on; here the counts are collected first.

A member that has ended the task, or dropped it, says nothing by itself. It answers HELD "after
every end" to a HOLD: no member stops then. The scheduler, which hears why a member drops the task,
cancels it at all members. No member ever decides by the time that passed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from typing import Final, NamedTuple

from millrace.core.errors import IntegrityError, TransferError
from millrace.core.instance.stop_point import StopPoint

#: First byte of a notification, by which a transport tells its subscribers apart.
CHANNEL: Final = 4


#: The position of a member that has not got the task any more: after every end.
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


class MessageKind(IntEnum):
    """What a message says. `value` in brackets."""

    HERE = 1  # to the leader: I have the task
    CALL = 2  # to a member: the leader has the task; say HERE if you have it
    OPEN = 3  # to a member: all members have the task
    READY = 4  # to the leader: nothing comes before the gang here
    WITHDRAW = 5  # to the leader: something does, may it run?
    STOP = 6  # to the leader: something comes before the gang, which runs
    HELD = 7  # to the leader: I begin nothing more [operators begun], and where I may stop
    START = 8  # to a member: all are ready
    RELEASE = 9  # to a member: you are free
    HOLD = 10  # to a member: begin nothing more, and say HELD
    GO_TO = 11  # to a member: run up to there and stop [position]


_TO_LEADER: Final = frozenset(
    {
        MessageKind.HERE,
        MessageKind.READY,
        MessageKind.WITHDRAW,
        MessageKind.STOP,
        MessageKind.HELD,
    }
)

# By number, which is quicker than the enum's own look-up.
_KINDS: Final = {int(kind): kind for kind in MessageKind}
_STOP_POINTS: Final = {int(point): point for point in StopPoint}

# channel u8, message kind u8, finest u8, attempt u32, chunk u32, value u32; then the request's id
_HEADER = struct.Struct("<BBBIII")


@dataclass(frozen=True, slots=True)
class Message:
    """A message from one member to another."""

    key: GangKey
    kind: MessageKind
    value: int = 0
    finest: StopPoint = StopPoint.OPERATOR

    def encode(self) -> bytes:
        request_id, attempt, chunk_index = self.key
        header = _HEADER.pack(CHANNEL, self.kind, self.finest, attempt, chunk_index, self.value)
        return header + request_id.encode()

    @staticmethod
    def decode(payload: bytes) -> Message:
        """Reads a message. Raises TransferError for bytes that `encode` can't have made."""
        try:
            channel, kind, finest, attempt, chunk_index, value = _HEADER.unpack_from(payload)
            if channel != CHANNEL:
                raise ValueError(f"channel {channel}")
            key = GangKey(payload[_HEADER.size :].decode(), attempt, chunk_index)
            return Message(key, _KINDS[kind], value, _STOP_POINTS[finest])
        except (struct.error, ValueError, KeyError) as error:
            raise TransferError(f"not a gang's message: {error}") from error


class State(Enum):
    """The state of a member."""

    AWAY = auto()  # it may run anything else
    READY = auto()  # it waits for START
    WITHDRAWN = auto()  # it waits for RELEASE or START
    RUNNING = auto()
    HOLDING = auto()  # the operator that it has begun runs on; it waits for GO_TO


class Step(Enum):
    """The action of a member before an operator."""

    BEGIN = auto()
    WAIT = auto()
    STOP = auto()


@dataclass(slots=True, eq=False)
class Gang:
    """One member's side of the protocol; at the leader, the leader's side too.

    `say(to, message)` takes each message to send. `finest` is asked where this member may stop.
    """

    spec: GangSpec
    say: Callable[[str, Message], None]
    finest: Callable[[], StopPoint]
    state: State = State.AWAY
    begun: int = 0  # operators, in all rounds: from a start to its stop
    stop_at: int | None = None  # as agreed in this round
    is_open: bool = False  # all members have the task
    here: set[str] = field(default_factory=set)  # the leader's: members that have the task
    asked: bool = False  # for a stop, in this round
    ready: set[str] = field(default_factory=set)  # the leader's, as of this round
    held: dict[str, Message] = field(default_factory=dict)  # the leader's

    @property
    def has_started(self) -> bool:
        return self.state in (State.RUNNING, State.HOLDING)

    def enter(self) -> None:
        """Notes that this member has the task now."""
        if self.spec.me == self.spec.leader:
            self._say_all(MessageKind.CALL)
        self._to_leader(MessageKind.HERE)

    def be_ready(self) -> None:
        """Notes that nothing comes before the gang here; this instance runs nothing else until
        `AWAY`.
        """
        self.state = State.READY
        self._to_leader(MessageKind.READY)

    def withdraw(self) -> None:
        """Notes that a task comes before the gang, for which this member has been ready."""
        if self.spec.me == self.spec.leader:
            self.state = State.AWAY
            self.ready.discard(self.spec.me)
        else:
            self.state = State.WITHDRAWN
            self._to_leader(MessageKind.WITHDRAW)

    def ask_stop(self) -> None:
        """Notes that a task comes before the gang, which has started."""
        if self.state is State.RUNNING and self.stop_at is None and not self.asked:
            self.asked = True
            self._to_leader(MessageKind.STOP)

    def begin(self) -> Step:
        """Decides what to do before an operator; after a WAIT it is called again for each
        message."""
        if self.begun == self.stop_at:
            return Step.STOP
        if self.state is State.HOLDING:
            return Step.WAIT
        self.begun += 1
        return Step.BEGIN

    def leave(self) -> None:
        """Notes that this member has stopped as agreed."""
        self.state = State.AWAY

    def hear(self, sender: str, message: Message) -> None:
        """Takes in a message of a member.

        A message that another message has made void changes nothing.
        """
        if message.kind in _TO_LEADER:
            self._lead(sender, message)
        else:
            self._follow(message)

    def waits_for(self) -> str:
        """Returns what this member waits for, in words."""
        if not self.is_open:
            return self._waits("OPEN", self.here, "HERE")
        match self.state:
            case State.READY:
                return self._waits("START", self.ready, "READY")
            case State.WITHDRAWN:
                return f"RELEASE of {self.spec.leader}"
            case State.HOLDING:
                return self._waits("GO_TO", self.held, "HELD")
            case State.RUNNING:
                return f"operator {self.begun - 1} to end"
            case State.AWAY:
                return "its turn"

    def _waits(self, leaders: str, heard: Collection[str], members: str) -> str:
        if self.spec.me != self.spec.leader:
            return f"{leaders} of {self.spec.leader}"
        missing = [member for member in self.spec.members if member not in heard]
        return f"{members} of {', '.join(missing)}"

    # -- every member

    def _follow(self, message: Message) -> None:
        match message.kind:
            case MessageKind.CALL:
                self._to_leader(MessageKind.HERE)
            case MessageKind.OPEN:
                self.is_open = True
            case MessageKind.START if self.state in (State.READY, State.WITHDRAWN):
                self._start()
            case MessageKind.RELEASE if self.state is State.WITHDRAWN:
                self.state = State.AWAY
            case MessageKind.HOLD if self.state is State.RUNNING:
                self.state = State.HOLDING
                self._to_leader(MessageKind.HELD, self.begun)
            case MessageKind.GO_TO if self.state is State.HOLDING:
                self._go_to(message.value)

    def _start(self) -> None:
        self.state = State.RUNNING
        self.stop_at, self.asked = None, False

    def _go_to(self, position: int) -> None:
        self.state = State.RUNNING
        self.stop_at = position

    # -- the leader

    def _lead(self, sender: str, message: Message) -> None:
        match message.kind:
            case MessageKind.HERE:
                self.here.add(sender)
                self._open_if_all_here()
            case MessageKind.READY:
                self.ready.add(sender)
                self._start_if_all_ready()
            case MessageKind.WITHDRAW if sender in self.ready:  # else START is on its way
                self.ready.discard(sender)
                self._say(sender, MessageKind.RELEASE)
            case MessageKind.STOP:
                self._hold_all()
            case MessageKind.HELD if self.state is State.HOLDING:
                self.held[sender] = message
                self._agree_if_all_held()

    def _open_if_all_here(self) -> None:
        if not self.is_open and len(self.here) == len(self.spec.members):
            self._say_all(MessageKind.OPEN)
            self.is_open = True

    def _start_if_all_ready(self) -> None:
        if len(self.ready) == len(self.spec.members):
            self.ready.clear()
            self._say_all(MessageKind.START)
            self._start()

    def _hold_all(self) -> None:
        if self.state is not State.RUNNING or self.stop_at is not None:
            return  # it is being agreed, or was
        if self.spec.stop_from(self.begun, self.finest()) == len(self.spec.stops):
            return  # too late, or not here
        self.held.clear()
        self._say_all(MessageKind.HOLD)
        self.state = State.HOLDING
        self._to_leader(MessageKind.HELD, self.begun)

    def _agree_if_all_held(self) -> None:
        if len(self.held) == len(self.spec.members):
            begun = max(held.value for held in self.held.values())
            finest = max(held.finest for held in self.held.values())
            position = self.spec.stop_from(begun, finest)
            self._say_all(MessageKind.GO_TO, position)
            self._go_to(position)

    # -- messages

    def _to_leader(self, kind: MessageKind, value: int = 0) -> None:
        finest = self.finest() if kind is MessageKind.HELD else StopPoint.OPERATOR
        message = Message(self.spec.key, kind, value, finest)
        if self.spec.me == self.spec.leader:
            self.hear(self.spec.me, message)
        else:
            self.say(self.spec.leader, message)

    def _say(self, to: str, kind: MessageKind, value: int = 0) -> None:
        self.say(to, Message(self.spec.key, kind, value))

    def _say_all(self, kind: MessageKind, value: int = 0) -> None:
        for member in self.spec.others:
            self._say(member, kind, value)


def answer_without_task(message: Message) -> Message | None:
    """Returns the message of an instance that has ended or dropped the task to a member that waits
    for it.
    """
    if message.kind is MessageKind.HOLD:
        return Message(message.key, MessageKind.HELD, GONE)
    return None
