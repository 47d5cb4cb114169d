"""A pool: the instances of one model, which can work together."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from millrace.core.config import SchedulerConfig
from millrace.core.cost.correction import Band, Corrections, OnTop, band_of
from millrace.core.cost.latency import SpLatency
from millrace.core.cost.rates import STARTING_RATE
from millrace.core.kv.pages import Shares
from millrace.core.live_request import LiveRequest
from millrace.core.priority import PriorityKey, Ranking
from millrace.core.scheduler.fleet.batching import filling_tokens
from millrace.core.scheduler.fleet.instances import (
    DecodeInstance,
    Instance,
    KvpInstance,
    PrefillInstance,
)
from millrace.core.scheduler.fleet.kvp_placement import KvpPlacement
from millrace.core.scheduler.fleet.planners import Planners
from millrace.core.scheduler.fleet.run_queue import RunQueue
from millrace.core.scheduler.fleet.waiting_queue import WaitingQueue
from millrace.core.scheduler.planning import PlannerInputs, degrees_used
from millrace.core.scheduler.planning.alternatives import alternatives
from millrace.core.scheduler.planning.one_chunk import quickest_chunk
from millrace.core.scheduler.planning.plan import Plan

#: The key of a pool's corrections, which hold for any instance that takes a request.
ANYONE = ""
#: The improvement rates of the plans that a request may have which would be late by the usual one:
#: a middle rate, since larger groups cost others work, then 0, the quickest.
_QUICKER = (STARTING_RATE, 0.0)


class Pool:
    """Instances of one model hash. Instances of two pools never work together.

    `prefill`, `decode` and `kvp` hold the instances that take new work; `members` also counts
    draining instances. An instance of role "mixed" is among `decode` and prefills its own prompts.
    """

    def __init__(self, config: SchedulerConfig, ranking: Ranking) -> None:
        self.prefill: dict[str, PrefillInstance] = {}
        self.decode: dict[str, DecodeInstance] = {}
        self.kvp: dict[str, KvpInstance] = {}
        self.kvp_placement = KvpPlacement(config, self.decode, self.kvp)
        self.members = 0
        self.corrections = Corrections()
        self.on_top = OnTop()
        self.lacks_pages = False  # in the last round an instance lacked the pages for a request
        self.ranking = ranking  # of the requests in both queues
        self.waiting = WaitingQueue(ranking)  # placed, waiting to be sent to prefill instances
        self.run_queue = RunQueue(ranking, preemptive=config.preemption != "none")
        self._config = config
        self._planners: Planners | None = None
        self.by_value = False  # a request that would be late may take the quickest plan
        self._now_s = 0.0  # of the last round
        self._degrees: tuple[int, ...] = (1,)
        self._latency: SpLatency | None = None
        self._shares = Shares((1,), 1, 0)
        self.smallest_slots = 0  # of the pages that every prefill instance has
        self._smallest_context = 0  # tokens
        self.batch_tokens = 0  # of whole prompts that are computed together
        self.prefillers = 0  # instances that prefill, mixed ones included

    @property
    def is_ready(self) -> bool:
        """Returns whether new work can be both prefilled and decoded here."""
        return bool(self.decode) and (bool(self.prefill) or any(self.mixed()))

    @property
    def degrees(self) -> tuple[int, ...]:
        """Returns the SP degrees that its planner gives groups, ascending."""
        self._prepare()
        return self._degrees

    def shares(self, request: LiveRequest) -> dict[int, int]:
        """Returns, by SP degree, the slots that a group's members need in pages for the rest of the
        prompt.

        The rest counts as one chunk: growing groups take more of their first members.
        """
        self._prepare()
        return self._shares.of(request.prompt_tokens - request.kept_tokens, request.kept_tokens)

    def least_sp(self, shares: dict[int, int]) -> int:
        """The smallest degree whose shares every instance can hold; the largest, if none is."""
        fitting = (sp for sp, slots in shares.items() if slots <= self.smallest_slots)
        return next(fitting, self._degrees[-1])

    def plan(self, request: LiveRequest, queue_s: array[float], least_sp: int) -> Plan:
        """Returns a plan of the configured planner over `prefill`, in its order.

        There must be one.
        """
        history = request.kept_tokens
        planner = self.planners.of(request.prompt_tokens, history)
        plan = planner.plan(request.prompt_tokens - history, queue_s, least_sp)
        slack_s = request.deadline_s - self._now_s
        if not self.by_value or history or plan.ttft_s <= slack_s:
            return plan
        return self._in_time(request, queue_s, least_sp, slack_s) or plan

    def alternatives(
        self, request: LiveRequest, queue_s: array[float], most_s: float
    ) -> Callable[[], list[tuple[tuple[str, ...], float]]]:
        """Returns a function that computes what one chunk takes on the best group of each SP
        degree: its instances and the seconds to the first token, below `most_s`.
        """
        history, ids = request.kept_tokens, tuple(self.prefill)
        inputs = self.planners.inputs(request.prompt_tokens, history)
        tokens = request.prompt_tokens - history

        def compute() -> list[tuple[tuple[str, ...], float]]:
            return [
                (tuple(ids[member] for member in one.members), one.ttft_s)
                for one in alternatives(inputs.latency, inputs.nodes, tokens, queue_s, history)
                if one.ttft_s < most_s
            ]

        return compute

    def _in_time(
        self, request: LiveRequest, queue_s: array[float], least_sp: int, slack_s: float
    ) -> Plan | None:
        """Returns the first of some quicker plans that saves the request's objective."""
        if request.allowed_ttft_s is None or slack_s < 0.0 or len(self._degrees) < 2:
            return None
        for rate in _QUICKER:
            if rate < self._config.improvement_rate:
                planner = self.planners.of(request.prompt_tokens, 0, rate)
                plan = planner.plan(request.prompt_tokens, queue_s, least_sp)
                if plan.ttft_s <= slack_s:
                    return plan
        return None

    def one_chunk(
        self, request: LiveRequest, queue_s: array[float], shares: dict[int, int]
    ) -> Plan | None:
        """Returns the quickest plan of one chunk whose members can hold their shares at all."""
        able = {
            sp: [one.could_hold(request, slots) for one in self.prefill.values()]
            for sp, slots in shares.items()
        }
        inputs = self.planners.inputs(request.prompt_tokens, request.kept_tokens)
        tokens = request.prompt_tokens - request.kept_tokens
        return quickest_chunk(inputs, tokens, queue_s, able)

    def rerank(self, now_s: float) -> None:
        """Gives the requests that wait in the pool, and the tasks of its instances, the keys that
        they have now.
        """
        self._now_s = now_s
        keys = self.ranking.update(now_s, len(self.prefill))
        self.waiting.rerank(keys)
        self.run_queue.rerank(keys)

    def rank_by(self, ranking: Ranking, now_s: float) -> None:
        """Ranks all requests by another policy from now on."""
        self.ranking = ranking
        self.waiting.rank_by(ranking, now_s)
        self.run_queue.rank_by(ranking, now_s)

    def configure(self, config: SchedulerConfig) -> None:
        """Sets the planners' settings from now on."""
        self._config = config
        self._forget_planner()

    def changed(self, instance: Instance) -> None:
        """Notes that the instance takes new work now, or no more."""
        if instance.draining:
            self.prefill.pop(instance.id, None)
            self.decode.pop(instance.id, None)
            self.kvp.pop(instance.id, None)
        elif isinstance(instance, PrefillInstance):
            self.prefill[instance.id] = instance
        elif isinstance(instance, DecodeInstance):
            self.decode[instance.id] = instance
        else:
            self.kvp[instance.id] = instance
        self.prefillers = len(self.prefill) + sum(1 for _ in self.mixed())
        self._forget_planner()

    def _forget_planner(self) -> None:
        self._planners = self._latency = None
        self._degrees = (1,)

    def predict(self, request: LiveRequest) -> None:
        """Notes the predicted seconds of the rest of the request's prefill, alone on the idle pool.

        By the latency model, corrected by the observed times of the pool's instances.
        """
        kept = request.kept_tokens
        prefill_s = self.rest_s(request, kept)
        least = self._degrees[0]
        request.predict(prefill_s, least * self._rest_s(request.prompt_tokens, kept, least))

    def rest_s(self, request: LiveRequest, kept: int) -> float:
        """The seconds of the tokens after the first `kept` tokens, alone on the idle pool."""
        self._prepare()
        return min(self._rest_s(request.prompt_tokens, kept, sp) for sp in self._degrees)

    def predicted_s(self, prompt_tokens: int, kept: int, sp: int) -> float:
        """Returns the seconds of the tokens after the first `kept` tokens on an idle group of `sp`.

        Degrees beyond those of the latency model count as its largest.
        """
        self._prepare()
        known = max((one for one in self.latency.by_sp if one <= sp), default=1)
        return self._rest_s(prompt_tokens, kept, known)

    def _rest_s(self, prompt_tokens: int, kept: int, sp: int) -> float:
        modelled_s = self.latency.chunk_s(prompt_tokens - kept, kept, sp)
        return self.corrected_s(band_of(prompt_tokens, sp), modelled_s)

    def corrected_s(self, band: Band, modelled_s: float) -> float:
        """Returns what such work takes at any instance, by what it took so far."""
        return self.corrections.seconds(ANYONE, band, modelled_s)

    def predicted_ttft_s(self, request: LiveRequest, now_s: float) -> float:
        """The seconds of the work before the request, of its own work, and on top of computing.

        The requests of the queue count as if they were alike.
        """
        if not self.waiting and any(not prefill.queue for prefill in self.prefill.values()):
            return self._own_s(request)
        key = self.ranking.key(request, now_s)
        queued_s = self.waiting.work_before_s(key, request.order)
        return self.ttft_after_s(request, key, queued_s, now_s)

    def ttft_after_s(
        self, request: LiveRequest, key: PriorityKey, queued_s: float, now_s: float
    ) -> float:
        """The same with `queued_s` seconds of the queue before a request with this key.

        With no request before it in the queue, it goes to the instance with the least work before
        it. Else the work of the queue and of all instances is taken to be shared evenly.
        """
        own_s, rank = self._own_s(request), (key, request.order, 0)
        ahead_s = [
            self.run_queue.ahead_s(prefill, rank, now_s) for prefill in self.prefill.values()
        ] or [0.0]
        return own_s + ((sum(ahead_s) + queued_s) / len(ahead_s) if queued_s else min(ahead_s))

    def _own_s(self, request: LiveRequest) -> float:
        return request.predicted_prefill_s + self.on_top.seconds(request.prompt_tokens)

    @property
    def latency(self) -> SpLatency:
        """Returns the latency model; a pool's instances are taken to be of one kind."""
        if self._latency is None:
            some: list[Instance] = [*self.prefill.values(), *self.mixed()]
            self._latency = some[0].card.latency
        return self._latency

    def could_prefill(self, request: LiveRequest) -> bool:
        """Returns whether a group could take the request once it is empty."""
        if not self.prefill:
            return any(self.mixed())
        shares = self.shares(request)
        is_new = request.attempt <= 1 and not request.attempts
        if is_new and self._all_have_room(request, shares):
            return True  # no instance holds an earlier attempt
        return any(
            sum(p.could_hold(request, slots) for p in self.prefill.values()) >= sp
            for sp, slots in shares.items()
        )

    def could_decode(self, request: LiveRequest) -> bool:
        """Returns whether its instances are large enough; an earlier attempt may be in the way."""
        owners = self.kv_owners()
        if self.kvp_placement.wanted(request, owners):
            return self.kvp_placement.is_large_enough(request, owners)
        return any(owner.is_large_enough(request) for owner in owners)

    def could_serve(self, request: LiveRequest) -> bool:
        """Returns whether its instances are large enough to prefill and, if need be, decode a
        request; they may still hold an attempt of a former scheduler's.
        """
        needs_decode = not (request.prefill_only and self.prefill)
        return self._is_large_enough(request) and (not needs_decode or self.could_decode(request))

    def _is_large_enough(self, request: LiveRequest) -> bool:
        if not self.prefill:
            return any(self.mixed())
        shares = self.shares(request)
        return self._all_have_room(request, shares) or any(
            sum(p.is_large_enough(request, slots) for p in self.prefill.values()) >= sp
            for sp, slots in shares.items()
        )

    def _all_have_room(self, request: LiveRequest, shares: Mapping[int, int]) -> bool:
        """Returns whether every prefill instance is large enough, without looking at each."""
        in_context = request.prompt_tokens <= self._smallest_context
        return in_context and min(shares.values()) <= self.smallest_slots

    def kv_owners(self) -> list[DecodeInstance]:
        """The instances where requests can be placed: mixed only, without any prefill instance."""
        return list(self.decode.values() if self.prefill else self.mixed())

    def mixed(self) -> Iterator[DecodeInstance]:
        """Those that prefill what they decode."""
        return (d for d in self.decode.values() if d.card.role == "mixed")

    @property
    def planners(self) -> Planners:
        """Returns the planners over `prefill`, where there must be an instance."""
        self._prepare()
        assert self._planners is not None
        return self._planners

    def _prepare(self) -> None:
        if self._planners is not None or not self.prefill:
            return
        cards = [p.card for p in self.prefill.values()]
        numbers: dict[str, int] = {}
        nodes = tuple(numbers.setdefault(c.node or c.instance_id, len(numbers)) for c in cards)
        pages = {(card.page_tokens, card.kv_layers) for card in cards}
        latency, page = self.latency, (cards[0].page_tokens, cards[0].kv_layers)
        if len(pages) > 1:  # members give pages to each other: they must be alike
            latency, page = latency.limited(1), (1, 0)
        inputs = PlannerInputs(latency=latency, nodes=nodes, config=self._config)
        self._planners = Planners(inputs, partial(self.corrections.seconds, ANYONE))
        self._degrees = degrees_used(inputs)
        self._shares = Shares(self._degrees, *page)
        self.smallest_slots = min(card.kv_pages * card.page_tokens for card in cards)
        self._smallest_context = min(card.max_context_tokens for card in cards)
        wanted = self._config.batch_tokens
        self.batch_tokens = filling_tokens(latency.by_sp[1]) if wanted < 0 else wanted
