"""The simulated instances: their names, their commands, their joining and leaving."""

from __future__ import annotations

from functools import lru_cache

from millrace.core.cost.decode_step import DecodeStepTime
from millrace.core.cost.operators import OperatorModel
from millrace.core.scheduler import effects as fx
from millrace.core.scheduler import events
from millrace.profiles import decode_step
from millrace.sim.cluster.job import Job
from millrace.sim.cluster.spec import SimSpec
from millrace.sim.cluster.world import World
from millrace.sim.models.decode_model import DecodeInstance, DecodePool
from millrace.sim.models.kvp_model import KvpPool, KvpWorker
from millrace.sim.models.mixed_latency import mixed_latency
from millrace.sim.models.mixed_model import MixedInstance, MixedPool
from millrace.sim.models.prefill_instance import PrefillInstance
from millrace.sim.models.prefill_model import PrefillPool
from millrace.sim.objectives import isolated_prefill

Instance = PrefillInstance | DecodeInstance | MixedInstance | KvpWorker

ToInstance = fx.AdmitDecode | fx.RunPrefill | fx.Order | fx.CancelOn

#: A command, the incarnation of the instance that it is for, and the request if work comes with it.
Command = tuple[Instance, ToInstance, Job | None]

_LETTERS = {"p": "prefill", "d": "decode", "m": "mixed", "k": "kvp"}


def role_of(instance_id: str) -> str:
    """Returns the role that an instance's name stands for."""
    return _LETTERS[instance_id[0]]


@lru_cache(maxsize=16)
def _step(operators: OperatorModel) -> DecodeStepTime:
    """Returns the fit that such an instance registers."""
    return DecodeStepTime.of(decode_step.of_profile(operators))


class Fleet:
    """All instances."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._spec = world.spec
        self.decode = DecodePool(world)
        self.prefill = PrefillPool(world, self.decode)
        self.mixed = MixedPool(world)
        self.kvp = KvpPool(world)
        spec, whole = world.spec, world.spec.profile.prefill
        self._latencies = {"prefill": whole, "decode": whole, "kvp": whole}
        self._steps = {
            "decode": _step((spec.decode_profile or spec.profile).operators),
            "mixed": _step(spec.profile.operators),
        }
        self._kv_tokens = {
            "prefill": spec.prefill_kv_tokens,
            "decode": spec.decode_kv_tokens,
            "mixed": spec.decode_kv_tokens,
            "kvp": spec.kvp_kv_tokens,
        }
        if world.spec.packing is not None:
            self._latencies["mixed"] = mixed_latency(world.spec)
        self.isolated_s = isolated_prefill(world.spec)  # of a prompt, by its tokens
        self._joined_s: dict[str, float] = {}  # of the instances that are up
        self._generations: dict[str, int] = {}
        self._nodes = _Nodes(world.spec)

    # ---- incarnations

    def start(self) -> list[events.InstanceJoined]:
        """Lets all instances join at time 0."""
        return [self.join(instance_id) for instance_id in self._spec.instance_ids]

    def join(self, instance_id: str) -> events.InstanceJoined:
        """Starts a new incarnation of the instance; returns the event for the machine."""
        generation = self._generations.get(instance_id, 0) + 1
        self._generations[instance_id] = generation
        self._joined_s[instance_id] = self._world.clock.now_s
        role, spec = role_of(instance_id), self._spec
        node = self._nodes.of(instance_id)
        if role == "prefill":
            self.prefill.join(instance_id, generation, node)
        elif role == "decode":
            self.decode.join(instance_id, generation)
        elif role == "mixed":
            self.mixed.join(instance_id, generation)
        else:
            self.kvp.join(instance_id, generation)
        return events.InstanceJoined(
            instance_id=instance_id,
            generation=generation,
            role=role,
            kv_pages=max(self._kv_tokens[role] // spec.page_tokens, 1),
            page_tokens=spec.page_tokens,
            max_context_tokens=spec.max_context_tokens,
            max_batch=spec.max_batch,
            model_hash=spec.profile.model,
            latency=self._latencies[role],
            node=node,
            decode_step=self._steps.get(role),
        )

    def leave(self, instance_id: str) -> bool:
        """Removes the instance with all it held; False when it was already gone."""
        instance = self._find(instance_id)
        if instance is None or not instance.alive:
            return False
        if isinstance(instance, PrefillInstance):
            self.prefill.leave(instance)
        elif isinstance(instance, DecodeInstance):
            self.decode.leave(instance)
        elif isinstance(instance, MixedInstance):
            self.mixed.leave(instance)
        else:
            self.kvp.leave(instance)
        self._world.forget_worker(instance_id)
        self._count_incarnation(instance_id, self._world.clock.now_s)
        self._world.outbox.append(
            events.InstanceLeft(instance_id=instance_id, generation=instance.generation)
        )
        return True

    def generation(self, instance_id: str) -> int:
        """Returns the instance's latest generation."""
        return self._generations[instance_id]

    def is_idle(self, instance_id: str) -> bool:
        """Returns whether the instance holds nothing, so that a draining instance may leave."""
        instance = self._find(instance_id)
        if isinstance(instance, PrefillInstance):
            return self.prefill.is_idle(instance)
        if isinstance(instance, DecodeInstance):
            return self.decode.is_idle(instance)
        if isinstance(instance, MixedInstance):
            return self.mixed.is_idle(instance)
        return instance is None or self.kvp.is_idle(instance)

    def _count_incarnation(self, instance_id: str, now_s: float) -> None:
        lived_s = now_s - self._joined_s.pop(instance_id)
        self._world.tally.alive(role_of(instance_id), lived_s)

    def close(self, now_s: float) -> None:
        """Ends the count of instance-seconds: the last request has ended."""
        for instance_id in list(self._joined_s):
            self._count_incarnation(instance_id, now_s)
        self._joined_s.clear()

    def check_empty(self) -> None:
        """Raises IntegrityError when an instance holds anything."""
        self.prefill.check_empty()
        self.decode.check_empty()
        self.mixed.check_empty()
        self._world.check_empty()

    # ---- commands

    def addressed(self, effect: ToInstance) -> Command:
        """Returns the command, bound to the instance's present incarnation."""
        instance = self._find(effect.instance_id)
        assert instance is not None  # the machine knows only instances that joined
        if isinstance(effect, fx.RunPrefill | fx.AdmitDecode):
            return instance, effect, self._world.jobs.get(effect.request_id)
        return instance, effect, None

    def deliver(self, commands: list[Command]) -> None:
        """Carries commands out, in order; commands for an instance that is gone are lost."""
        for instance, effect, job in commands:
            if not instance.alive:
                continue
            self._note_shards(instance, effect, job)
            if isinstance(instance, PrefillInstance):
                self._to_prefill(instance, effect, job)
            elif isinstance(instance, MixedInstance):
                self._to_mixed(instance, effect, job)
            elif isinstance(instance, DecodeInstance):
                self._to_decode(instance, effect, job)

    def _note_shards(self, instance: Instance, effect: ToInstance, job: Job | None) -> None:
        """Notes where a request's KV goes, as the machine tells its KV owner."""
        if isinstance(effect, fx.CancelOn):
            self._world.let_go(instance.id, effect.request_id)
        elif isinstance(effect, fx.AdmitDecode) and job is not None:
            job.placed(effect.attempt, effect.shards)
            found = [self._find(shard.worker_id) for shard in effect.shards[1:]]
            held = {one.id: one.generation for one in found if one is not None and one.alive}
            if held:  # the machine replaces workers that died meanwhile
                self._world.kvp_workers[effect.request_id] = held

    def _to_decode(self, instance: DecodeInstance, effect: ToInstance, job: Job | None) -> None:
        if isinstance(effect, fx.AdmitDecode):
            if job is not None:
                self.decode.admit(instance, job)
        elif isinstance(effect, fx.CancelOn):
            self.decode.cancel(instance, effect.request_id)

    def _to_prefill(self, instance: PrefillInstance, effect: ToInstance, job: Job | None) -> None:
        if isinstance(effect, fx.RunPrefill):
            if job is not None:
                self.prefill.run(instance, effect, job)
        elif isinstance(effect, fx.Order):
            self.prefill.order(instance, effect)
        elif isinstance(effect, fx.CancelOn):
            self.prefill.cancel(instance, effect)

    def _to_mixed(self, instance: MixedInstance, effect: ToInstance, job: Job | None) -> None:
        """Carries out a command to a mixed instance, which also computes what it admits:
        `AdmitDecode` adds nothing.
        """
        if isinstance(effect, fx.RunPrefill):
            if job is not None:
                self.mixed.run(instance, job)
        elif isinstance(effect, fx.CancelOn):
            self.mixed.cancel(instance, effect.request_id)

    def settle(self) -> bool:
        """Lets instances start and stop work; False when no instance had a reason to."""
        if self.prefill.changed:
            self.prefill.settle()
        elif self.mixed.changed:
            self.mixed.settle()
        else:
            return False
        return True

    def _find(self, instance_id: str) -> Instance | None:
        if instance_id[0] == "p":
            return self.prefill.instances.get(instance_id)
        if instance_id[0] == "d":
            return self.decode.instances.get(instance_id)
        if instance_id[0] == "m":
            return self.mixed.instances.get(instance_id)
        return self.kvp.instances.get(instance_id)


class _Nodes:
    """Places instances on nodes: they fill nodes in order of their names, role by role."""

    def __init__(self, spec: SimSpec) -> None:
        self._gpus_per_node = spec.gpus_per_node
        self._gpus = {
            "p": spec.profile.tp,
            "d": spec.decoding.tp,
            "m": spec.profile.tp * spec.spp,
            "k": spec.decoding.tp,
        }

    def of(self, instance_id: str) -> str:
        letter, index = instance_id[0], int(instance_id[1:])
        return f"{letter}-node{index * self._gpus[letter] // self._gpus_per_node}"
