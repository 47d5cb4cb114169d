"""What the leader, the proxies and the instances hold of the same requests, when nothing is in
flight: each must hold what the others believe.
"""

from __future__ import annotations

from millrace.core.request import RequestState
from millrace.core.scheduler.machine import Machine
from millrace.proxy.generation.stage import Stage
from support.fleet_sim.nodes import SchedulerNode
from support.fleet_sim.processes import Process
from support.fleet_sim.tokens import lineage
from support.fleet_sim.world import SCHEDULERS, AnyInstance, World

MOST_ROUNDS = 12  # of messages and answers, until nothing is in flight
TAKEOVER_ROUNDS, ROUND_S = 60, 0.02  # until another scheduler leads, and all have met it
#: Stages of a request that the scheduler must know; of others the last tokens may be on their way.
_AT_SCHEDULER = (Stage.SUBMITTED, Stage.QUEUED)


def agree(world: World) -> bool:
    """Lets all messages come, without any work, and compares the views. Raises AssertionError."""
    if (machine := _settled(world)) is not None:
        _check_proxies(world, machine)
        for name, one in world.fleet.items():
            if not one.process.has_lost:
                _check_instance(name, one, machine)
    return True


def take_over(world: World, victim: str) -> bool:
    """Kills the leader and lets all meet the next one, without any work. No request may begin again
    unless the `victim`, a proxy, dies as soon as it has met the next leader ("-": none does).
    Raises AssertionError.
    """
    machine, leader = _settled(world), world.leader()
    if (
        machine is None
        or leader is None
        or any(world.nodes[s].process.has_lost for s in SCHEDULERS)
    ):
        return True  # the messages have come
    before, streams = _placed(world, machine), _tokens_flow(world)
    world.perform(f"kill {leader.name}")
    world.perform(f"start {leader.name}")
    for _ in range(TAKEOVER_ROUNDS):
        world.flush_all()
        world.pass_time(ROUND_S)
        following = world.leader()
        if following is not None and victim in world.proxies:
            node = world.nodes[victim]
            if node.process in _met(world, following):
                world.flush_all()
                world.perform(f"kill {victim}")
                victim = ""
        elif following is not None and _is_as_one(world, following):
            break
    else:
        return True
    # A note may be lost with the store's data.
    waits = world.is_patient and not world.losses and streams
    if victim == "-" and waits and (machine := _settled(world)) is not None:
        after = _placed(world, machine)
        lost = {name: place for name, place in before.items() if after.get(name) != place}
        assert not lost, f"the takeover has lost {lost} of {before}, and has {after}"
    return agree(world)


def _placed(world: World, machine: Machine) -> dict[str, tuple[str, int]]:
    """The instance and the attempt of each request that was sent to prefill, that decode holds, and
    that its proxy wants there: not one whose first token was lost with its stream, or whose client
    has left, for which no proxy waits long.
    """
    gone = {client.name for client in world.clients.values() if client.gone}
    wanted = {
        one.spec.request_id
        for name in world.proxies
        for one in world.proxy(name).gateway.requests
        if one.stage is not Stage.UNPLACED and _client_of(one.spec.request_id) not in gone
    }
    found = {}
    for name, one in world.fleet.items():
        for request in one.table:
            if not request.ended and request.id in wanted and not one.process.has_lost:
                found[request.id] = (name, request.attempt)
    sent = {
        name
        for name, one in machine.requests.items()
        if one.chunks or one.state is RequestState.DECODING  # adopted after prefill's death
    }
    return {name: place for name, place in found.items() if name in sent}


def _tokens_flow(world: World) -> bool:
    """Whether every proxy reads the tokens of every instance. Where it does not, it learns later
    which tokens are lost, and migrates their requests.
    """
    read = {call.up.name for call in world.network.calls if not call.over}
    speak = [name for name, one in world.fleet.items() if one.card.role in ("decode", "mixed")]
    living = [name for name in (*world.proxies, *speak) if not world.nodes[name].process.has_lost]
    proxies = [name for name in living if name in world.proxies]
    return all(f"{x}>{name} tokens" in read for x in proxies for name in living if name in speak)


def _client_of(request_id: str) -> str:
    return lineage(request_id).replace("cmpl-", "r")


def _settled(world: World) -> Machine | None:
    """Lets all messages come. Returns the leader's machine if all have met the leader."""
    for _ in range(MOST_ROUNDS):
        if not world.network.wires():
            break
        world.flush_all()
    leader = world.leader()
    if leader is None or leader.leading is None or not _is_as_one(world, leader):
        return None
    return leader.leading.machine


def _met(world: World, leader: SchedulerNode) -> set[Process]:
    return {call.client for call in world.network.calls if call.server is leader.process}


def _is_as_one(world: World, leader: SchedulerNode) -> bool:
    """Whether nothing is silent or in flight, and all that live have met the leader."""
    if world.network.wires() or world.store.mode != "up":
        return False
    nodes = world.nodes.values()
    silent = (node.process for node in nodes)
    if any(one.paused or one.is_late or one.is_cut for one in silent):
        return False
    assert leader.leading is not None
    known = leader.leading.machine.cluster.instances
    met = _met(world, leader)
    proxies = [world.proxy(n) for n in world.proxies if not world.nodes[n].process.has_lost]
    # A leader tells of its fleet when its takeover has ended.
    if not proxies or any(one.process not in met or not one.gateway.connected for one in proxies):
        return False
    for name, one in world.fleet.items():
        its = known.get(name)
        is_known = its is not None and its.card.generation == one.incarnation.generation
        if is_known == one.process.has_lost:
            return False
    return True


def _check_proxies(world: World, machine: Machine) -> None:
    alive = [world.proxy(name) for name in world.proxies if not world.nodes[name].process.has_lost]
    wanted = {one.spec.request_id: one for node in alive for one in node.gateway.requests}
    instances = world.fleet.values()
    whole = {its.id for one in instances for its in one.table if its.ended and its.finish_reason}
    for name in machine.requests:
        assert name in wanted or name in whole, (
            f"{name} goes on at the scheduler, and no proxy has it"
        )
    for name, request in wanted.items():
        if request.recorded and request.stage in _AT_SCHEDULER:
            assert name in machine.requests, f"{name} waits for a scheduler that does not know it"


def _check_instance(name: str, one: AnyInstance, machine: Machine) -> None:
    believed = set(machine.cluster.instances[name].holdings)
    # Shards are freed by another thread, and a cancel may come before the owner asks for one.
    own = set(one.held()) - set(one.shards())
    assert believed >= own and (one.card.role == "kvp" or believed - own <= set(one.shards())), (
        f"{name} holds {own} and {one.shards()}, the scheduler believes {believed}"
    )
    for request in one.table:
        if request.ended:
            continue
        live = machine.requests.get(request.id)
        assert live is not None, f"{name} goes on with {request.id}, which has ended"
        assert (live.decode_id, live.attempt) == (name, request.attempt), (
            f"{name} has attempt {request.attempt} of {request.id}, the scheduler thinks of "
            f"attempt {live.attempt} at {live.decode_id}"
        )
