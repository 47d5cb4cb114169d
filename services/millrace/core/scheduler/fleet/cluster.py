"""All instances and their pools, and the policy, weights and rates that all pools share."""

from __future__ import annotations

from dataclasses import replace

from millrace.core.config import SchedulerConfig
from millrace.core.cost.answer_lengths import AnswerLengths
from millrace.core.cost.correction import Corrections
from millrace.core.cost.rates import live_rate
from millrace.core.live_request import LiveRequest
from millrace.core.priority import POLICIES
from millrace.core.priority.own_order import ranking_of
from millrace.core.scheduler.events import ImprovementRateChanged, InstanceJoined
from millrace.core.scheduler.fleet.absences import Absences
from millrace.core.scheduler.fleet.instances import (
    DecodeInstance,
    Instance,
    KvpInstance,
    PrefillInstance,
)
from millrace.core.scheduler.fleet.pool import Pool
from millrace.core.weights import Weights


class Cluster:
    """All instances by id, and by the hash of the model that they serve."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.weights = Weights()
        self.policy = POLICIES[config.policy]()
        self.instances: dict[str, Instance] = {}
        self.pools: dict[str, Pool] = {}
        self.absences = Absences()
        self.corrections = Corrections()
        self.answer_lengths = AnswerLengths()
        grows = config.decode_reserve == "grow"
        self._headroom_tokens = config.decode_headroom_tokens if grows else None
        self._live_rate = live_rate(config.improvement_rate, config.improvement_rates)
        self._config = replace(config, improvement_rate=self._live_rate.at(0.0))

    @property
    def improvement_rate(self) -> float:
        """Returns the share by which a larger group must cut the TTFT now."""
        return self._config.improvement_rate

    @property
    def improvement_source(self) -> str:
        """Returns how the rate is found: "by load", "by arrivals" or "fixed"."""
        return self._live_rate.source

    def arrived(self, request: LiveRequest, now_s: float) -> None:
        """Notes an arrival: as work comes faster, larger groups must bring a larger gain."""
        instances = sum(len(pool.prefill) for pool in self.pools.values())
        self._live_rate.arrived(now_s, request.predicted_work_s / max(instances, 1))
        self._use_rate(now_s)

    def change_rate(self, event: ImprovementRateChanged, now_s: float) -> None:
        """Sets a fixed rate, or a table, from now on."""
        self._live_rate.set_by_hand(event.rate)
        if event.rate is None:
            self._live_rate.replace_table(event.rows)
        for pool in self.pools.values():
            pool.by_value = self._live_rate.by_value
        self._use_rate(now_s)

    def _use_rate(self, now_s: float) -> None:
        rate = self._live_rate.at(now_s)
        if rate != self._config.improvement_rate:
            self._config = replace(self._config, improvement_rate=rate)
            for pool in self.pools.values():
                pool.configure(self._config)

    def current(self, instance_id: str, generation: int) -> Instance | None:
        """Returns the instance, if this is the incarnation that the scheduler knows."""
        instance = self.instances.get(instance_id)
        if instance is None or instance.card.generation != generation:
            return None
        return instance

    def pool_of(self, instance: Instance) -> Pool:
        return self.pools[instance.card.model_hash]

    def ready_pools(self) -> list[Pool]:
        return [pool for pool in self.pools.values() if pool.is_ready]

    def _pool(self, model_hash: str) -> Pool:
        pool = self.pools.get(model_hash)
        if pool is None:
            pool = self.pools[model_hash] = Pool(self._config, ranking_of(self.policy))
            pool.by_value = self._live_rate.by_value
        return pool

    def rank_by(self, policy: str, now_s: float) -> None:
        """Ranks all requests in pools by another policy from now on."""
        self.policy = POLICIES[policy]()
        self.policy.weigh(self.weights)
        for pool in self.pools.values():
            pool.rank_by(ranking_of(self.policy), now_s)

    def weigh(self, weights: Weights) -> None:
        """Uses these weights from now on; names without one keep theirs."""
        self.weights = self.weights.with_changes(weights)
        self.policy.weigh(self.weights)

    def add(self, card: InstanceJoined) -> Instance:
        """Adds a new instance that holds nothing. The id must be free."""
        self.absences.came(card.instance_id)
        pool = self._pool(card.model_hash)
        pool.members += 1
        instance: Instance
        if card.role == "prefill":
            taken = pool.run_queue.everyone
            bit = ~taken & (taken + 1)  # the lowest free one
            pool.run_queue.everyone |= bit
            instance = PrefillInstance(card, bit)
        elif card.role == "kvp":
            instance = KvpInstance(card)
        else:
            is_mixed = card.role == "mixed"  # it books pages of whole answers
            instance = DecodeInstance(card, None if is_mixed else self._headroom_tokens)
        self.instances[card.instance_id] = instance
        self.cordon(instance, cordoned=False)
        return instance

    def lose(self, instance: Instance, now_s: float) -> None:
        """Forgets an instance as `remove` does; unless it was leaving, it may come back."""
        if not instance.leaving:
            self.absences.lost(instance.card, now_s)
        self.remove(instance)

    def drain(self, instance: Instance) -> None:
        """Stops new work for the instance for ever."""
        instance.leaving = True
        self.cordon(instance, cordoned=True)

    def cordon(self, instance: Instance, *, cordoned: bool) -> None:
        """Stops new work for the instance, or allows it again unless the instance leaves."""
        instance.draining = cordoned or instance.leaving
        self.pool_of(instance).changed(instance)

    def remove(self, instance: Instance) -> None:
        """Forgets the instance and all that it holds; its tasks follow their requests."""
        self.drain(instance)
        del self.instances[instance.id]
        self.corrections.forget(instance.id)
        self.pool_of(instance).members -= 1

    def drop_if_empty(self, model_hash: str) -> None:
        """Forgets a pool that has no instance, draining ones included."""
        if self.pools[model_hash].members == 0:
            del self.pools[model_hash]
