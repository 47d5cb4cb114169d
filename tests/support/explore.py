"""Plays all that can happen in a `World` of gangs, once for each state that it can be in."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass

from millrace.core.config import SchedulerConfig
from millrace.core.events import InstanceJoined
from millrace.core.gang import GangSpec
from millrace.core.latency import SpLatency
from millrace.core.planning.single_chunk import SingleChunk
from millrace.core.priority import Policy
from support.gang_world import Move, Scenario, World, digest

_NEW, _ON_THE_WAY, _DONE = range(3)
_SHARED: dict[int, object] = {}  # what never changes is not copied


def _share(thing: object) -> tuple[object, tuple[int]]:
    _SHARED[id(thing)] = thing
    return _shared, (id(thing),)


def _shared(number: int) -> object:
    return _SHARED[number]


def _anew(planner: object) -> tuple[object, tuple[()]]:
    """A pool without a planner makes one."""
    return _nothing, ()


def _nothing() -> None:
    return None


_UNCHANGING = (Policy, SchedulerConfig, SpLatency, InstanceJoined, Scenario, GangSpec)


def snapshot(world: World) -> bytes:
    """Of a world, to be read by `pickle.loads` in this process."""
    written = io.BytesIO()
    pickler = pickle.Pickler(written, protocol=5)
    pickler.dispatch_table = {SingleChunk: _anew, **dict.fromkeys(_UNCHANGING, _share)}
    pickler.dump(world)
    return written.getvalue()


@dataclass
class Found:
    """What `explore` came across."""

    states: int = 0
    moves: int = 0
    ends: int = 0
    stops: int = 0  # moves in which a member stopped


@dataclass
class _Visit:
    """A state on the way from the first one, and which of its moves was tried last."""

    blob: bytes
    moves: list[Move]
    key: int
    tried: int = -1


def explore(scenario: Scenario) -> Found:
    """Every state that can be reached, depth first.

    Raises what a move or a check raises, and AssertionError where nothing can happen though not all
    is done, or where something could go on for ever. The moves that lead there are a note of it.
    """
    found, seen = Found(), dict[int, int]()
    way: list[_Visit] = []
    try:
        _visit(World(scenario), found, seen, way)
        while way:
            here = way[-1]
            here.tried += 1
            if here.tried == len(here.moves):
                seen[here.key] = _DONE
                way.pop()
                continue
            world = pickle.loads(here.blob)
            world.stops = 0
            world.play(here.moves[here.tried])
            found.moves += 1
            found.stops += world.stops
            _visit(world, found, seen, way)
    except Exception as error:
        error.add_note(f"after {[visit.moves[visit.tried] for visit in way]}")
        raise
    return found


def _visit(world: World, found: Found, seen: dict[int, int], way: list[_Visit]) -> None:
    key = hash(digest(world))
    state = seen.get(key, _NEW)
    assert state != _ON_THE_WAY, "this can go on for ever"
    if state == _DONE:
        return
    seen[key] = _ON_THE_WAY
    found.states += 1
    moves = world.moves()
    if all(kind == "crash" for kind, *_ in moves):
        world.check_end()
        found.ends += 1
    way.append(_Visit(snapshot(world), moves, key))
