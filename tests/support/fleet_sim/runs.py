"""Runs of the simulation: drawn by a seed, or read from a transcript; a run that fails is shrunk.

A transcript has a line for the fleet, then a line for each action. A line that begins with `#` is a
comment.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from millrace.core.config import Config
from support.fleet_sim.model import BLOCK_TOKENS, PAGE_TOKENS
from support.fleet_sim.processes import virtual_time
from support.fleet_sim.tokens import ASKED_TOKENS, FAMILY
from support.fleet_sim.views import agree, take_over
from support.fleet_sim.world import World, at_a_stretch

#: The instances and the proxies of a run; two schedulers are always there.
FLEETS = (
    "p0 d0 d1 x0",
    "p0 p1 d0 x0",
    "p0 p1 d0 d1 x0",
    "p0 d0 x0 x1",
    "p0 d0 m0 x0",
    "m0 x0 x1",
)
#: Fleets of the real services: groups, and requests that are spread over KVP workers.
SERVICE_FLEETS = (
    "q0 e0 x0",
    "q0 q1 e0 x0",
    "q0 q1 q2 e0 x0",
    "q0 q1 q2 e0 e1 x0",
    "q0 e0 k0 x0",
    "q0 q1 e0 k0 k1 x0",
    "q0 e0 e1 k0 x0",
)
#: Of families: the pools of some are small, so that cached blocks are evicted.
ALL_SERVICE_FLEETS = (*SERVICE_FLEETS, "q5 e5 x0", "q5 q6 e5 x0", "q5 q6 e5 e6 x0", "q5 e5 x0 x1")
#: Of answers that grow: the pools of decode are small.
GROWING_FLEETS = ("q0 e7 x0", "q0 q1 e7 x0", "q0 e7 e8 x0", "q0 q1 e7 e8 x0 x1")
PLANNERS = ("cdsp", "single_chunk", "least_queue")
POLICIES = ("fcfs", "s_edf", "millrace")
ROOMS = ("wide", "wide", "patient", "narrow")
#: The most requests of a run.
MOST_REQUESTS = {"wide": 3, "patient": 3, "narrow": 8}
PATIENT_S = 0.8  # of a takeover; peers look every 0.2 s who leads

ACTIONS = 90  # drawn for a run, before all faults end
FAULTS_OF_A_RUN = (0, 1, 2, 2, 3, 3, 4, 5)
AT_A_STRETCH = 0.7  # the chance of more of the same at once
FAULTS = (
    "takeover",
    "kill",
    "kill",
    "pause",
    "cut",
    "break",
    "break",
    "store",
    "leave",
    "drop",
    "drop",
)
SERVICE_FAULTS = (*FAULTS, "kill", "late", "late", "late")
#: Of batches, of which single prompts are cancelled: these happen between two operators.
BATCH_FAULTS, FAULTS_OF_BATCHES, BATCH_STRETCH = (*SERVICE_FAULTS, *["leave"] * 16), (1, 3, 6), 0.2
PROMPTS, LONG_PROMPTS = (20, 100, 400), (20, 100, 400, 1200)
#: Tokens of one request at one instance where there are KVP workers, and prompts for two and three.
MOST_KV_TOKENS, SPREAD_PROMPTS = 320, (20, 100, 400, 600, 850)
#: The chance of short prompts that are computed together, in one pass or in several; and of these
#: the least that is no batch any more, prompts and the most requests.
BATCHES, BATCH_TOKENS, BATCHED_PROMPTS, MOST_BATCHED = 0.25, 350, (20, 50, 100, 200), 12
#: The chance that answers grow: when memory runs out, an answer moves, or goes to host memory of so
#: many pages. Prompts, answers, and the most requests.
GROWS, SWAP_PAGES, PAGE_BYTES = 0.2, 8, 256
#: Their faults come when memory is short, and more clients leave.
GROWING_ACTIONS = 200
GROWING_FAULTS = (*SERVICE_FAULTS, *["leave"] * 6)
GROWING_PROMPTS, GROWING_ANSWERS, MOST_GROWING = (10, 20, 60, 100), (4, 25, 40, 56), 8
KIND_CHARACTERS = 30  # of a failure's text
#: Prompts and answers of requests that begin alike, and the chance that the first one is answered
#: before all others are asked.
FAMILY_PROMPTS, SPREAD_FAMILY = (100, 200, 330, 400, 1200), (100, 200, 290, 400, 600)
FAMILY_ANSWERS, MOST_OF_FAMILY, SETTLES = (1, 3, 6, 28, 40), 6, 0.7
#: Of all actions: something starts again, time passes, or all that is in flight comes.
RECOVERS, WAITS, AGREES = 0.04, 0.1, 0.02


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a run begins with. `pauses`: the seed of the services' own random pauses."""

    members: str
    planner: str
    policy: str
    pauses: int
    #: "narrow": most requests are refused, and come again. "patient": a leader waits for all peers.
    room: str = "wide"
    batches: bool = False  # many short prompts come at about the same time
    #: "grow": answers get pages as they grow. "swap": the same, and some memory of the host.
    memory: str = "whole"

    @property
    def serves(self) -> bool:
        """Whether the instances run the real services."""
        return self.members.startswith("q")

    @property
    def spreads(self) -> bool:
        """Whether there are KVP workers, and prompts long enough for them."""
        return "k0" in self.members

    @property
    def is_tight(self) -> bool:
        """Whether pools are small."""
        return "q5" in self.members

    @property
    def faults(self) -> Sequence[str]:
        """The kinds of faults, each as often as it is drawn."""
        if self.batches:
            return BATCH_FAULTS
        if self.grows:
            return GROWING_FAULTS
        return SERVICE_FAULTS if self.serves else FAULTS

    @property
    def grows(self) -> bool:
        """Whether answers get their pages one by one."""
        return self.memory != "whole"

    @staticmethod
    def drawn(seed: int, *, services: bool) -> Setting:
        rng = random.Random(seed)
        drawn = Setting(
            members=rng.choice(ALL_SERVICE_FLEETS if services else FLEETS),
            planner=rng.choice(PLANNERS),
            policy=rng.choice(POLICIES),
            pauses=seed,
            room=rng.choice(ROOMS),
            batches=services and rng.random() < BATCHES,
        )
        if not services or drawn.batches or rng.random() > GROWS:
            return drawn
        memory = rng.choice(["grow", "swap"])
        return replace(drawn, members=rng.choice(GROWING_FLEETS), memory=memory)

    def __str__(self) -> str:
        parts = [self.members, self.planner, self.policy, str(self.pauses), self.room]
        parts += ["batches"] * self.batches + [self.memory] * self.grows
        return f"fleet {'; '.join(parts)}"


@dataclass
class Run:
    """A run and its end. `actions` are those that could happen."""

    setting: Setting
    actions: list[str] = field(default_factory=list)
    failure: Exception | None = None

    def __str__(self) -> str:
        return "\n".join([str(self.setting), *self.actions])

    @property
    def kind(self) -> str:
        """What failed, without names and numbers: the first words; empty if nothing has."""
        text = "" if self.failure is None else f"{type(self.failure).__name__} {self.failure}"
        return re.sub(r"\w*\d\w*", "", text)[:KIND_CHARACTERS]


def parse(transcript: str) -> tuple[Setting, list[str]]:
    first, *actions = [line for line in transcript.splitlines() if line and line[0] != "#"]
    members, planner, policy, pauses, *room = first.removeprefix("fleet ").split("; ")
    setting = Setting(members=members, planner=planner, policy=policy, pauses=int(pauses))
    words = {"room": room[0]} if room else {}
    words |= {"memory": room[-1]} if room and room[-1] in ("grow", "swap") else {}
    return replace(setting, **words, batches="batches" in room), actions


@cache
def config_of(setting: Setting) -> Config:
    config, room = Config(), setting.room
    if setting.serves:
        config = replace(
            config,
            engine=replace(
                config.engine,
                max_chunk_tokens=256,
                max_suspended=2,
                max_batch=8,
                prefix_block_tokens=BLOCK_TOKENS,
                swap_bytes=SWAP_PAGES * PAGE_BYTES if setting.memory == "swap" else 0,
            ),
            transfer=replace(
                config.transfer, handshake_timeout_s=8.0, transfer_timeout_s=20.0, lease_s=20.0
            ),
            scheduler=replace(
                config.scheduler,
                batch_tokens=BATCH_TOKENS if setting.batches else 0,
                max_kv_tokens_per_worker=MOST_KV_TOKENS if setting.spreads else 0,
                decode_reserve="grow" if setting.grows else "whole",
                decode_headroom_tokens=PAGE_TOKENS,
            ),
        )
    if room == "narrow":
        config = replace(
            config,
            scheduler=replace(config.scheduler, max_queue_requests=1, tasks_ahead=1),
            proxy=replace(config.proxy, max_inflight=4, max_parked=1),
        )
    scheduler = replace(
        config.scheduler,
        takeover_wait_s=PATIENT_S if room == "patient" else 0.2,
        planner=setting.planner,
        policy=setting.policy,
        tasks_ahead=1 if setting.batches else config.scheduler.tasks_ahead,
        improvement_rate=0.0,
        heartbeat_s=1.5,
        lease_s=4.0,
        leader_lease_s=0.4,
        isolation_s=0.5,
        breaker_pause_s=0.5,
    )
    return replace(config, scheduler=scheduler, proxy=replace(config.proxy, submit_timeout_s=4.0))


def run(seed: int, *, services: bool = False) -> Run:
    """Draws a run by the seed, ends all faults, and checks all. With `services` the instances run
    the real services.
    """
    return _run(Setting.drawn(seed, services=services), None, random.Random(seed))


def replay(setting: Setting, actions: Sequence[str]) -> Run:
    """Performs the actions; those that can't happen are left out."""
    return _run(setting, actions, random.Random())


def _run(setting: Setting, actions: Sequence[str] | None, rng: random.Random) -> Run:
    found = Run(setting)
    with virtual_time(setting.pauses) as loop:
        config = config_of(replace(setting, pauses=0))
        world = World(loop, config, setting.members.split())
        try:
            with world.patched():
                world.start()
                if actions is None:
                    _draw(world, rng, found.actions, setting)
                else:
                    for action in actions:
                        _note_and_perform(world, found.actions, action)
                world.finish()
        except Exception as error:
            found.failure = error
        finally:
            world.close()
    return found


# ---- drawing


def _draw(world: World, rng: random.Random, actions: list[str], setting: Setting) -> None:
    """Performs random actions."""
    asked = _asked(rng, setting)
    faults = rng.choice(FAULTS_OF_BATCHES if setting.batches else FAULTS_OF_A_RUN)
    first, end = (ACTIONS // 2, GROWING_ACTIONS) if setting.grows else (0, ACTIONS)
    kinds = {rng.randrange(first, end): "fault" for _ in range(faults + 2 * setting.grows)}
    last = ACTIONS // 2 if len(asked) < 4 else ACTIONS
    last = 2 * len(asked) if setting.batches else last
    kinds |= {0: "submit"} | {rng.randrange(last): "submit" for _ in asked[1:]}
    if asked[0].startswith(f"r{FAMILY}"):
        kinds |= {1: "settle"} if rng.random() < SETTLES else {}
    for number in range(end):
        match kinds.get(number):
            case "submit":
                verb = rng.choice(["submit", "stream"])
                name, sizes = asked.pop(0).split(maxsplit=1)
                action = f"{verb} {name} {rng.choice(world.proxies)} {sizes}"
            case "settle":
                action = "settle"
            case "fault":
                action = _fault(world, rng, setting.faults)
            case _:
                action = _step(world, rng, setting)
        _note_and_perform(world, actions, action)


def _asked(rng: random.Random, setting: Setting) -> list[str]:
    """Draws requests: names, and the tokens of prompts and answers. Half of the runs of the real
    services have families.
    """
    if setting.batches:
        found = range(rng.randint(4, MOST_BATCHED))
        return [f"r{n} {rng.choice(BATCHED_PROMPTS)} {rng.randint(1, 6)}" for n in found]
    if setting.grows:
        first = rng.choice([0, FAMILY])
        found = range(first, first + rng.randint(4, MOST_GROWING))
        sizes = [(rng.choice(GROWING_PROMPTS), rng.choice(GROWING_ANSWERS)) for _ in found]
        return [f"r{n} {prompt} {new}" for n, (prompt, new) in zip(found, sizes, strict=True)]
    most = MOST_REQUESTS[setting.room]
    if not setting.serves or not (setting.is_tight or rng.random() < 0.5):
        sizes = _prompts(setting)
        found = range(rng.randint(2, most + 1))
        return [f"r{number} {rng.choice(sizes)} {rng.randint(1, 6)}" for number in found]
    sizes = SPREAD_FAMILY if setting.spreads else FAMILY_PROMPTS
    if setting.is_tight:
        sizes = [size for size in sizes if size <= 400]
    numbers: list[int] = []
    for _ in range(rng.randint(1, max(most, MOST_OF_FAMILY))):
        family = 1 if rng.random() < 0.75 else 2
        before = sum(number // FAMILY == family for number in (FAMILY, *numbers))
        numbers.append(family * FAMILY + before)
    others = [f"r{n} {rng.choice(sizes)} {rng.choice(FAMILY_ANSWERS)}" for n in numbers]
    return [f"r{FAMILY} {ASKED_TOKENS} {FAMILY_ANSWERS[-1]}", *others]


def _note_and_perform(world: World, actions: list[str], action: str) -> None:
    """Notes the action before: it may fail."""
    actions.append(action)
    if not _perform(world, action):
        actions.pop()


def _perform(world: World, action: str) -> bool:
    """Performs an action; `agree` and `takeover` compare what all hold."""
    verb, _, rest = action.partition(" ")
    match verb:
        case "agree":
            return agree(world)
        case "takeover":
            return take_over(world, rest)
    return world.perform(action)


def _step(world: World, rng: random.Random, setting: Setting) -> str:
    chance = rng.random()
    if chance > 1 - AGREES:
        return "agree"
    if chance < RECOVERS and (repairs := world.repairs()):
        return rng.choice(repairs)
    work = world.work()
    if not work or chance > 1 - AGREES - WAITS:
        return f"time {rng.choice([0.05, 0.2, 0.5] if work else [0.1, 0.3, 1.0])}"
    action = rng.choice(work)
    if rng.random() > (BATCH_STRETCH if setting.batches else AT_A_STRETCH):
        return action
    return at_a_stretch(action.replace("step ", "steps ", 1) if setting.grows else action)


def _prompts(setting: Setting) -> Sequence[int]:
    if setting.spreads:
        return SPREAD_PROMPTS if "k1" in setting.members else SPREAD_PROMPTS[:-1]
    return LONG_PROMPTS if setting.serves else PROMPTS


def _fault(world: World, rng: random.Random, faults: Sequence[str]) -> str:
    match rng.choice(faults):
        case "kill" | "pause" | "cut" | "late" as verb:
            return f"{verb} {_victim(world, rng)}"
        case "break":
            calls = [call.up.name for call in world.network.calls if not call.over]
            return f"break {rng.choice(calls)}" if calls else "time 0.1"
        case "takeover":
            return f"takeover {rng.choice(['-', *world.proxies])}"
        case "store":
            return f"store {rng.choice(['away', 'mute', 'lost'])}"
        case "drop":
            return f"drop {_client(world, rng)} {rng.randrange(3)}"
    return f"leave {_client(world, rng)}"


def _client(world: World, rng: random.Random) -> str:
    return rng.choice(list(world.clients))


def _victim(world: World, rng: random.Random) -> str:
    """Picks a process for a fault: the leader in two of five cases."""
    leader = world.leader()
    if leader is not None and rng.random() < 0.4:
        return leader.name
    return rng.choice(list(world.nodes))


# ---- shrinking


def shrink(failed: Run) -> Run:
    """Leaves out actions while the run still fails in the same way (delta debugging)."""
    best, size = failed, max(len(failed.actions) // 2, 1)
    while True:
        shorter = _without_some(best, size)
        if shorter is not None:
            best = shorter
        elif size > 1:
            size //= 2
        else:
            return best


def _without_some(best: Run, size: int) -> Run | None:
    """Leaves out one stretch of `size` actions, if the rest still fails."""
    for start in range(0, len(best.actions), size):
        rest = [*best.actions[:start], *best.actions[start + size :]]
        found = replay(best.setting, rest)
        if found.kind == best.kind and len(found.actions) < len(best.actions):
            return found
    return None
