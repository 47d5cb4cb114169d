"""Prefill instances as far as gangs go, under the real machine, with every step visible.

A `World` has the parts of `gang_node` and all messages in flight between them. `moves` lists what
could happen next: a message or a command arrives, an instance begins or ends an operator, a request
arrives, an instance dies, its last messages are lost. Every operator is a ring step, unless the
scenario says otherwise: it ends at no member before all have begun it.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from core.instance.gang_node import (
    Compute,
    Fail,
    Hear,
    Meet,
    Node,
    NodeView,
    NodeWord,
    Post,
    Prompt,
    Release,
    Said,
    Scenario,
    Scheduler,
    SchedulerView,
    Stopped,
    Watch,
)
from millrace.core.instance.gang import GangKey, Message, MessageKind
from millrace.core.instance.preemption import PreemptionRule
from millrace.core.instance.stop_point import StopPoint
from millrace.core.scheduler import effects, events

Move = tuple[str, ...]

#: Messages by which a gang opens.
OPENING = frozenset({MessageKind.HERE, MessageKind.CALL, MessageKind.OPEN})

#: Optional moves: all must be done without them.
ACCIDENTS = frozenset({"crash", "policy", "cancel", "fail", "drop"})


class SchedulerPart(Protocol):
    """A `Scheduler` by its answers: the part's state after the message, and the messages that it
    sends.
    """

    @property
    def view(self) -> SchedulerView: ...
    @property
    def digest(self) -> Hashable: ...
    def after(
        self, word: events.Event | Prompt | Watch
    ) -> tuple[SchedulerPart, tuple[effects.Effect, ...]]: ...


class NodePart(Protocol):
    """A `Node` by its answers, as `SchedulerPart`."""

    @property
    def view(self) -> NodeView: ...
    @property
    def digest(self) -> Hashable: ...
    def after(self, word: NodeWord) -> tuple[NodePart, tuple[Said, ...]]: ...


class Live:
    """A part that changes in place."""

    def __init__(self, part: Scheduler | Node) -> None:
        self._part = part

    @property
    def view(self):
        return self._part.view()

    @property
    def digest(self):
        return self._part.digest()

    def after(self, word):
        return self, tuple(self._part.step(word))


class World:
    """The state of the whole world. `play` makes one of `moves`."""

    def __init__(self, scenario: Scenario, part=Live) -> None:
        """`part` makes a part of a `Scheduler` or `Node`."""
        self.coming = scenario.prompts
        self.crashes = scenario.crashes
        self.mortal = [f"p{number}" for number in scenario.mortal]
        self.policies = scenario.policies
        self.cancels = scenario.cancels
        self.failures = scenario.failures
        self.losses = scenario.losses
        self.opens_at_once = scenario.opens_at_once
        self.rings = scenario.rings
        self.lost = False  # a message was: the watch may be needed
        self.scheduler: SchedulerPart = part(Scheduler(scenario))
        self.nodes: dict[str, NodePart] = {}
        self.links: dict[tuple[str, str], tuple[bytes, ...]] = {}  # none is empty
        self.commands: dict[str, tuple[effects.Effect, ...]] = {}  # alike
        self.stops = 0
        for number in range(scenario.instances):
            node = Node(f"p{number}", scenario.stops, PreemptionRule(scenario.most_held))
            node.rule.finest = StopPoint.of(scenario.preemption)
            self.nodes[node.name] = part(node)

    def copy(self) -> World:
        """Returns a copy of a world whose parts do not change."""
        other = World.__new__(World)
        other.__dict__.update(self.__dict__)
        other.nodes, other.links = self.nodes.copy(), self.links.copy()
        other.commands = self.commands.copy()
        other.stops = 0
        return other

    def state(self) -> Hashable:
        """Returns all state on which later events depend, if equal parts are the same object."""
        links, commands = frozenset(self.links.items()), frozenset(self.commands.items())
        nodes = tuple(self.nodes.values())
        left = (self.coming, self.crashes, self.policies, self.cancels, self.failures)
        left = (*left, self.losses, self.lost)
        return (self.scheduler, nodes, links, commands, left)

    def digest(self) -> Hashable:
        """Returns the same, independent of the objects of the parts."""
        nodes = tuple(node.digest for node in self.nodes.values())
        return (self.scheduler.digest, nodes, *self.state()[2:])

    # -- what can happen

    def moves(self) -> list[Move]:
        found: list[Move] = [("deliver", *link) for link in self.links]
        found += [("command", name) for name in self.commands]
        found += [
            ("meet", name, request_id)
            for name, node in self.nodes.items()
            for request_id, members in node.view.meeting.items()
            if self._have_joined(members, request_id, node.view.jobs[request_id])
        ]
        found += [("compute", name) for name in self.nodes if self.can_compute(name)]
        found += [("arrive", prompt.name) for prompt in self.coming[:1]]
        found += [("policy", name) for name in self.policies[:1]]
        requests = self.scheduler.view.requests
        found += [("cancel", name) for name in self.cancels if name in requests]
        if self.failures:
            found += [("fail", name, request_id) for name, request_id in self._jobs_in_use()]
        found += [("lose", *link) for link in self.links if link[0] not in self.nodes]
        if self.crashes and len(self.nodes) > 1:
            found += [("crash", name) for name in self.mortal if name in self.nodes]
        if self.losses:
            found += [("drop", *link) for link in self.links if link[0] in self.nodes]
        if self.lost and requests and all(kind in ACCIDENTS for kind, *_ in found):
            found.append(("watch",))
        return found

    def play(self, move: Move) -> None:
        match move:
            case ("deliver", sender, receiver):
                self._tell(receiver, Hear(sender, self._take((sender, receiver))))
            case ("lose", *link):
                del self.links[tuple(link)]
            case ("command", name):
                command, *rest = self.commands.pop(name)
                if rest:
                    self.commands[name] = tuple(rest)
                self._tell(name, command)
            case ("meet", name, request_id):
                self._tell(name, Meet(request_id))
            case ("compute", name):
                self._tell(name, Compute())
            case ("arrive", _):
                self._report(self.coming[0])
                self.coming = self.coming[1:]
            case ("watch",):
                self._watch()
            case (kind, *rest) if kind in ACCIDENTS:
                self._happen(kind, *rest)
        self._release()

    def _happen(self, *accident: str) -> None:
        match accident:
            case ("policy", name):
                self.policies = self.policies[1:]
                self._report(events.PolicyChanged(policy=name))
            case ("cancel", name):
                self.cancels = tuple(other for other in self.cancels if other != name)
                self._report(events.CancelRequested(request_id=name, reason="gone"))
            case ("fail", name, request_id):
                self.failures -= 1
                self._tell(name, Fail(request_id))
            case ("drop", *link):
                self.losses -= 1
                self.lost = True
                self._take(tuple(link))
            case ("crash", name):
                self._crash(name)

    def check_end(self) -> None:
        """Checks that all is done when no move exists."""
        assert not self.scheduler.view.requests, "requests are left behind"
        for name, node in self.nodes.items():
            assert not node.view.jobs, f"{name} is left with work"

    def _jobs_in_use(self) -> list[tuple[str, str]]:
        """Returns the jobs that instances compute or must compute for a live request."""
        computed = self.scheduler.view.computed
        return [
            (name, request_id)
            for name, node in self.nodes.items()
            for request_id, attempt in node.view.jobs.items()
            if (request_id, attempt) in computed
        ]

    def _have_joined(self, members: tuple[str, ...], request_id: str, attempt: int) -> bool:
        """Returns whether all members of a job's group have its command."""
        return all(
            member in self.nodes and self.nodes[member].view.jobs.get(request_id) == attempt
            for member in members
        )

    # -- an instance's compute thread

    def can_compute(self, name: str) -> bool:
        """Returns whether it can continue: a ring step ends when all members have begun it.

        A member without the task has ended it, or has aborted the wait of the others.
        """
        view = self.nodes[name].view
        if view.waits_in is None:
            return view.ready
        spec, task, at = view.waits_in
        is_free = self.rings is not None and at not in self.rings
        return is_free or all(self._is_past(member, spec.key, task, at) for member in spec.others)

    def _is_past(self, member: str, key: GangKey, task: str, at: int) -> bool:
        node = self.nodes.get(member)
        if node is None:
            return True
        gang = node.view.gangs.get(key)
        if gang is not None:
            return gang.begun >= at
        is_coming = node.view.jobs.get(key.request_id) == key.attempt
        return not is_coming or task in node.view.ended

    def _check_stop(self, stopped: Stopped) -> None:
        """Checks that all members that have the task stop where this member stops, or have stopped
        there.
        """
        self.stops += 1
        for node in self.nodes.values():
            gang = node.view.gangs.get(stopped.key)
            if gang is not None:
                at = stopped.at
                assert gang.begun <= at, "one is past the stop"
                assert gang.stop_at in (at, None) or gang.begun == at, "stops differ"

    # -- messages

    def _tell(self, name: str, word: NodeWord) -> None:
        self.nodes[name], said = self.nodes[name].after(word)
        for one in said:
            match one:
                case Post(to, payload) if to in self.nodes:
                    if self.opens_at_once and Message.decode(payload).kind in OPENING:
                        self._tell(to, Hear(name, payload))
                    else:
                        self.links[name, to] = (*self.links.get((name, to), ()), payload)
                case Stopped():
                    self._check_stop(one)
                case Post():
                    pass  # to a dead instance
                case _:
                    self._report(one)

    def _report(self, event: events.Event | Prompt | Watch) -> None:
        """Reports at once to the scheduler; its commands take time."""
        self.scheduler, found = self.scheduler.after(event)
        for effect in found:
            name = effect.instance_id
            if name in self.nodes:
                self.commands[name] = (*self.commands.get(name, ()), effect)

    def _release(self) -> None:
        """Lets instances free requests of which they have no task left, if the scheduler needs no
        more prefill of them.
        """
        computed = self.scheduler.view.computed
        for name, node in self.nodes.items():
            for attempt in node.view.idle:
                if attempt not in computed:
                    self._tell(name, Release(attempt[0]))

    def _take(self, link: tuple[str, str]) -> bytes:
        """Takes the next message on the link."""
        payload, *rest = self.links.pop(link)
        if rest:
            self.links[link] = tuple(rest)
        return payload

    def _watch(self) -> None:
        """Reports to the scheduler that nothing happens any more."""
        views = {name: node.view.standstill for name, node in self.nodes.items()}
        self._report(Watch(tuple((n, s) for n, s in views.items() if s is not None)))

    def _crash(self, name: str) -> None:
        self.crashes -= 1
        del self.nodes[name]
        self.commands.pop(name, None)
        for link in [link for link in self.links if link[1] == name]:
            del self.links[link]
        self._report(events.InstanceLeft(instance_id=name, generation=1))
