"""The simulated instances of all roles: who they are, how commands find them, how they come and go."""

from __future__ import annotations

from millrace.core import effects as fx
from millrace.core import events
from millrace.sim.decode_model import DecodeInstance, DecodePool
from millrace.sim.job import Job
from millrace.sim.prefill_model import PrefillInstance, PrefillPool
from millrace.sim.spec import SimSpec
from millrace.sim.world import World

Instance = PrefillInstance | DecodeInstance

#: A command, the life of the instance that it is for, and the request if work comes with it.
Command = tuple[Instance, fx.Effect, Job | None]

_LETTERS = {"p": "prefill", "d": "decode", "m": "mixed"}


def role_of(instance_id: str) -> str:
    """The role that an instance's name tells."""
    return _LETTERS[instance_id[0]]


class Fleet:
    """All instances."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._spec = world.spec
        self.decode = DecodePool(world)
        self.prefill = PrefillPool(world, self.decode)
        self._joined_s: dict[str, float] = {}  # of those that are there
        self._generations: dict[str, int] = {}
        self._nodes = _Nodes(world.spec)
        self._degrees = [
            sp for sp in world.spec.profile.prefill.degrees if sp <= max(world.spec.prefill, 1)
        ]

    def isolated_s(self, tokens: int) -> float:
        """Seconds of a prompt alone on the idle cluster, at the best degree it has room for."""
        chunk_s = self._spec.profile.prefill.chunk_s
        return min(chunk_s(tokens, 0, sp) for sp in self._degrees)

    # ---- lives

    def start(self) -> list[events.InstanceJoined]:
        """Everybody joins at time 0."""
        return [self.join(instance_id) for instance_id in self._spec.instance_ids]

    def join(self, instance_id: str) -> events.InstanceJoined:
        """A new life of the instance; the event that tells the machine."""
        generation = self._generations.get(instance_id, 0) + 1
        self._generations[instance_id] = generation
        self._joined_s[instance_id] = self._world.clock.now_s
        role, spec = role_of(instance_id), self._spec
        tokens = spec.prefill_kv_tokens if role == "prefill" else spec.decode_kv_tokens
        if role == "prefill":
            self.prefill.join(instance_id, generation)
        else:
            self.decode.join(instance_id, generation)
        return events.InstanceJoined(
            instance_id=instance_id,
            generation=generation,
            role=role,
            kv_pages=max(tokens // spec.page_tokens, 1),
            page_tokens=spec.page_tokens,
            max_context_tokens=spec.max_context_tokens,
            max_batch=spec.max_batch,
            model_hash=spec.profile.model,
            latency=spec.profile.prefill,
            node=self._nodes.of(instance_id),
        )

    def leave(self, instance_id: str) -> bool:
        """The instance is gone with all it held; False when it was already."""
        instance = self._find(instance_id)
        if instance is None or not instance.alive:
            return False
        if isinstance(instance, PrefillInstance):
            self.prefill.leave(instance)
        else:
            self.decode.leave(instance)
        self._count_life(instance_id, self._world.clock.now_s)
        self._world.outbox.append(
            events.InstanceLeft(instance_id=instance_id, generation=instance.generation)
        )
        return True

    def _count_life(self, instance_id: str, now_s: float) -> None:
        lived_s = now_s - self._joined_s.pop(instance_id)
        self._world.tally.alive(role_of(instance_id), lived_s)

    def close(self, now_s: float) -> None:
        """The last request has ended: instance-seconds count up to here."""
        for instance_id in list(self._joined_s):
            self._count_life(instance_id, now_s)
        self._joined_s.clear()

    def check_empty(self) -> None:
        """Raises IntegrityError when an instance holds anything."""
        self.prefill.check_empty()
        self.decode.check_empty()

    # ---- commands

    def addressed(self, effect: fx.Effect) -> Command:
        """The command, bound to the instance's present life."""
        assert isinstance(effect, fx.AdmitDecode | fx.RunPrefill | fx.Order | fx.CancelOn)
        instance = self._find(effect.instance_id)
        assert instance is not None  # the machine knows only instances that joined
        job = None
        if isinstance(effect, fx.AdmitDecode | fx.RunPrefill):
            job = self._world.jobs.get(effect.request_id)
        return instance, effect, job

    def deliver(self, commands: list[Command]) -> None:
        """Carries commands out, in order; those for an instance that is gone are lost."""
        prefill, decode = self.prefill, self.decode
        for instance, effect, job in commands:
            if not instance.alive:
                continue
            if isinstance(instance, PrefillInstance):
                if isinstance(effect, fx.RunPrefill):
                    if job is not None:
                        prefill.run(instance, effect, job)
                elif isinstance(effect, fx.Order):
                    prefill.order(instance, effect)
                elif isinstance(effect, fx.CancelOn):
                    prefill.cancel(instance, effect)
            elif isinstance(effect, fx.AdmitDecode):
                if job is not None:
                    decode.admit(instance, job)
            elif isinstance(effect, fx.CancelOn):
                decode.cancel(instance, effect.request_id)

    def settle(self) -> bool:
        """Lets instances start and stop work; False when none had a reason to."""
        return self.prefill.settle()

    def _find(self, instance_id: str) -> Instance | None:
        if instance_id[0] == "p":
            return self.prefill.instances.get(instance_id)
        return self.decode.instances.get(instance_id)


class _Nodes:
    """Which node an instance is on: they fill nodes in order of their names, role by role."""

    def __init__(self, spec: SimSpec) -> None:
        self._gpus_per_node = spec.gpus_per_node
        self._gpus = {
            "p": spec.profile.tp,
            "d": spec.decoding.tp,
            "m": spec.profile.tp * spec.spp,
        }

    def of(self, instance_id: str) -> str:
        letter, index = instance_id[0], int(instance_id[1:])
        return f"{letter}-node{index * self._gpus[letter] // self._gpus_per_node}"
