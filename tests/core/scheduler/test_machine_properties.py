"""No sequence of events raises, loses a request, leaks a reservation or leaves `TRANSITIONS`.

Events come late, twice, out of order, for unknown requests and from ended incarnations. The events
of correct workers are among them, so some requests reach the end of their answers.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from millrace.core.config import SchedulerConfig
from millrace.core.cost.decode_step import DecodeStepTime
from millrace.core.cost.latency import Latency, SpLatency
from millrace.core.live_request import LiveRequest
from millrace.core.priority import POLICIES
from millrace.core.request import MIN_KEPT_TOKENS, TRANSITIONS, Request, RequestState, Slo
from millrace.core.scheduler import effects, events, reports
from millrace.core.scheduler.fleet.instances import PrefillInstance
from millrace.core.scheduler.machine import Machine
from millrace.core.scheduler.outcomes.admission import MOST_FULL
from millrace.core.scheduler.planning import PLANNERS
from millrace.core.weights import Weights
from support.priority import STATIC

PREFILLS = ("p0", "p1", "p2")
DECODES = ("d0", "d1", "d2")
KVPS = ("k0", "k1")
REQUESTS = tuple(f"r{i}" for i in range(12))
PROXIES = ("x0", "x1")
LATENCY = SpLatency(
    by_sp={sp: Latency(a=0.02 * sp, b=0.02 / sp, c=2e-4 / sp, d=1e-4 / sp) for sp in (1, 2, 4)}
)
STEP = DecodeStepTime(base_s=0.01, per_sequence_s=0.01, per_context_token_s=1e-4)
TIMEOUT_S = 50.0
RELEASE_S = 20.0
BLOCK_TOKENS = 16

Ref = tuple[str, int]  # request, chunk

request_ids = st.sampled_from(REQUESTS)
instance_ids = st.sampled_from(PREFILLS + DECODES + KVPS)
reasons = st.sampled_from(["stop", "length", "cancelled"])
layers = st.sampled_from([0, 4, 4, 4, 8])
ages = st.integers(0, 2)  # how many incarnations ago the sender ran


def prefix(family: int, blocks: int) -> tuple[int, ...]:
    return tuple(100 * (family + 1) + index for index in range(blocks))


class World(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.settled = True
        self.generation: Counter[str] = Counter()
        self.states: dict[str, RequestState] = {}  # of submissions that are not over
        self.submitted: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.placed_at: dict[str, str] = {}
        self.attempt: dict[str, int] = {}  # as last reported to decode
        self.admitted: dict[tuple[str, str], int] = {}  # (decode instance, request) -> attempt
        self.held: dict[str, set[str]] = {}  # instance -> requests that a correct worker holds
        self.queues: dict[str, list[tuple[Ref, ...]]] = {}  # prefill instance -> its queue
        self.cached: dict[str, set[int]] = {}  # instance -> blocks that it has reported
        self.leaving: set[str] = set()  # instances that said so, and
        self.cordoned: set[str] = set()  # those that others keep new work from

    @initialize(
        tasks_ahead=st.integers(1, 3),
        max_queue_requests=st.integers(1, 8),
        max_queue_s=st.sampled_from([0.1, 1.0, 600.0]),
        max_attempts=st.integers(1, 3),
        policy=st.sampled_from(sorted(POLICIES)),
        planner=st.sampled_from(sorted(PLANNERS)),
        preemption=st.sampled_from(["none", "operator"]),
        batch_tokens=st.sampled_from([0, 40]),
        kv_layers=layers,
        most=st.sampled_from([0, 0, 80, 160]),
        degree=st.sampled_from([0, 0, 2]),
        reserve=st.sampled_from(["whole", "grow"]),
        roles=st.tuples(*[st.sampled_from(["decode", "decode", "mixed"])] * len(DECODES)),
    )
    def begin(
        self,
        tasks_ahead: int,
        max_queue_requests: int,
        max_queue_s: float,
        max_attempts: int,
        policy: str,
        planner: str,
        preemption: str,
        batch_tokens: int,
        kv_layers: int,
        most: int,
        degree: int,
        reserve: str,
        roles: tuple[str, ...],
    ) -> None:
        self.roles = dict.fromkeys(PREFILLS, "prefill") | dict.fromkeys(KVPS, "kvp")
        self.roles |= dict(zip(DECODES, roles, strict=True))
        self.config = SchedulerConfig(
            max_kv_tokens_per_worker=most,
            max_kvp_degree=degree,
            decode_reserve=reserve,
            decode_headroom_tokens=6,
            policy=policy,
            planner=planner,
            preemption=preemption,
            batch_tokens=batch_tokens,
            fixed_sp=2,
            tasks_ahead=tasks_ahead,
            max_queue_requests=max_queue_requests,
            max_queue_s=max_queue_s,
            max_attempts=max_attempts,
            request_timeout_s=TIMEOUT_S,
            release_timeout_s=RELEASE_S,
        )
        self.machine = Machine(self.config)
        for instance_id in ("p0", "p1", "d0", "d1", "k0"):
            self.join(instance_id, 1, 100, "h", kv_layers)

    def step(self, event: events.Event) -> None:
        # These change predictions only; what that changes shows in the next round.
        self.settled = not isinstance(event, reports.ChunkStarted | reports.ChunkSuspended)
        for effect in self.machine.step(event, self.now_s):
            self.see(effect)

    def see(self, effect: effects.Effect) -> None:
        match effect:
            case effects.Record():
                self.recorded(effect)
            case effects.Refuse(request_id=r):
                assert effect.code in ("overloaded", "unavailable", "too_large")
                assert (effect.retry_after_s >= 1.0) is (effect.code != "too_large")
                assert self.states[r] is RequestState.QUEUED and r not in self.placed_at
                self.over(r)
            case effects.Fail(request_id=r):
                assert r in self.states and effect.message
            case effects.Place(request_id=r, decode_id=decode_id):
                assert effect.predicted_ttft_s >= 0.0
                assert r not in self.placed_at
                assert decode_id not in self.leaving | self.cordoned
                self.placed_at[r] = decode_id
            case effects.AdmitDecode(instance_id=i, request_id=r):
                self.admit(effect)
            case effects.RunPrefill():
                self.dispatched(effect)
            case effects.Order():
                self.reorder(effect)
            case effects.CancelOn(instance_id=i, request_id=r):
                assert i in self.held
                self.unqueue(i, r)

    def admit(self, effect: effects.AdmitDecode) -> None:
        """Notes an admission. A new attempt has its own number; a resumed attempt finds its decode
        instance holding it.

        Reports of pages that decode frees may be in flight, so only the machine's commands count.
        """
        i, r = effect.instance_id, effect.request_id
        assert self.placed_at[r] == i
        assert effect.attempt > self.attempt.get(r, 0)
        request = self.machine.requests[r]
        assert effect.kept_tokens == request.kept_tokens < request.prompt_tokens
        assert effect.shards == request.shards
        if effect.shards:
            self.spread(effect)
        if effect.kept_tokens:
            assert not effect.shards
            assert effect.kept_tokens >= MIN_KEPT_TOKENS and request.resumable
        if effect.kept_tokens and effect.attempt == 1:  # out of its prefix cache
            blocks, rest = divmod(effect.kept_tokens, BLOCK_TOKENS)
            assert not rest and request.choices == 1
            assert self.cached[i] >= set(request.prefix_hashes[:blocks])
            self.hold(i, r)
        elif effect.kept_tokens:
            assert not self.machine.cluster.instances[i].holdings[r].leaving
            self.held[i].add(r)
        else:
            self.hold(i, r)
        self.attempt[r] = effect.attempt
        self.admitted[i, r] = effect.attempt

    def spread(self, effect: effects.AdmitDecode) -> None:
        """Checks that every shard is at another instance that takes work, and within the limits: of
        the tokens of a shard, unless the request would fit nowhere then.
        """
        workers = [shard.worker_id for shard in effect.shards]
        assert workers[0] == effect.instance_id and len(set(workers)) == len(workers)
        assert not set(workers) & (self.leaving | self.cordoned | set(PREFILLS))
        most, degree = self.config.max_kv_tokens_per_worker, self.config.max_kvp_degree
        request = self.machine.requests[effect.request_id]
        tokens = request.prompt_tokens + request.max_new_tokens
        there = {i for i in (*DECODES, *KVPS) if i in self.machine.cluster.instances}
        holders = len(there - self.leaving - self.cordoned)
        holders = min(holders, degree or holders)
        longest = max(shard.num_tokens for shard in effect.shards)
        assert longest <= 400
        assert not most or longest <= most or (longest - BLOCK_TOKENS) * holders < tokens
        assert not degree or len(workers) <= degree
        assert request.choices == 1
        for worker in workers[1:]:
            self.hold(worker, effect.request_id)
            self.admitted[worker, effect.request_id] = effect.attempt

    def recorded(self, effect: effects.Record) -> None:
        r, state = effect.request_id, effect.state
        was = self.states[r]
        assert state is was or state in TRANSITIONS[was], f"{r}: {was} -> {state}"
        self.states[r] = state
        if state.is_final:
            self.over(r)
        elif state is RequestState.QUEUED and effect.decode_id is None:
            self.placed_at.pop(r, None)

    def dispatched(self, effect: effects.RunPrefill) -> None:
        i, r = effect.instance_id, effect.request_id
        request = self.machine.requests[r]
        assert 1 <= request.attempts <= self.config.max_attempts
        assert i not in self.leaving | self.cordoned
        if effect.decode_id:
            assert effect.decode_id == self.placed_at[r] and effect.attempt == self.attempt[r]
        else:  # prefill only: the leader emits the result
            assert request.prefill_only and not request.shards and not request.kept_tokens
            assert self.placed_at[r] == effect.chunks[0].instance_ids[0]
        assert effect.chunks[0].start_token == request.kept_tokens
        tokens = sum(chunk.num_tokens for chunk in effect.chunks)
        assert tokens == request.prompt_tokens - request.kept_tokens
        assert effect.shards == request.shards
        if i == effect.decode_id:
            return  # it holds the request already, and orders its own work
        self.hold(i, r)
        self.queues[i] += [
            ((r, chunk.index),) for chunk in effect.chunks if i in chunk.instance_ids
        ]

    def hold(self, instance_id: str, request_id: str) -> None:
        """Checks that a worker never gets a request that it still holds."""
        assert request_id not in self.held[instance_id]
        self.held[instance_id].add(request_id)

    def reorder(self, effect: effects.Order) -> None:
        told = {ref for entry in self.queues[effect.instance_id] for ref in entry}
        order = [
            tuple((ref.request_id, ref.chunk_index) for ref in entry) for entry in effect.queue
        ]
        assert {ref for entry in order for ref in entry} <= told
        self.queues[effect.instance_id] = order

    def unqueue(self, instance_id: str, request_id: str) -> None:
        if instance_id in self.queues:
            self.queues[instance_id] = [
                tuple(ref for ref in entry if ref[0] != request_id)
                for entry in self.queues[instance_id]
            ]

    def over(self, request_id: str) -> None:
        del self.states[request_id]
        self.placed_at.pop(request_id, None)
        self.attempt.pop(request_id, None)
        self.ends[request_id] += 1

    # ---- instances

    @rule(
        instance_id=instance_ids,
        ahead=st.integers(-1, 1),
        pages=st.integers(8, 100),
        model=st.sampled_from("hhhhg"),
        kv_layers=layers,
    )
    def join(self, instance_id: str, ahead: int, pages: int, model: str, kv_layers: int) -> None:
        generation = max(self.generation[instance_id] + ahead, 0)
        known = self.machine.cluster.instances.get(instance_id)
        if known is None or generation > known.card.generation:
            self.held[instance_id] = set()
            self.cached[instance_id] = set()
            self.queues[instance_id] = []
            self.generation[instance_id] = generation
            self.leaving.discard(instance_id)
            self.cordoned.discard(instance_id)
        self.step(
            events.InstanceJoined(
                instance_id=instance_id,
                generation=generation,
                role=self.roles[instance_id],
                kv_pages=pages,
                page_tokens=4,
                max_context_tokens=400,
                max_batch=4,
                model_hash=model,
                latency=LATENCY,
                block_tokens=BLOCK_TOKENS,
                decode_step=STEP if instance_id in DECODES[:2] else None,
                node=instance_id[-1:] if model == "g" else "n",
                kv_layers=kv_layers,
            )
        )

    def life(self, instance_id: str, age: int) -> int:
        return self.generation[instance_id] - age

    @rule(instance_id=instance_ids, age=ages, silent=st.booleans())
    def leave(self, instance_id: str, age: int, silent: bool = False) -> None:
        if self.machine.cluster.current(instance_id, self.life(instance_id, age)):
            del self.held[instance_id]
            self.leaving.discard(instance_id)
            self.cordoned.discard(instance_id)
        generation = self.life(instance_id, age)
        self.step(
            events.InstanceLeft(instance_id=instance_id, generation=generation, silent=silent)
        )

    @rule(instance_id=instance_ids, age=ages)
    def drain(self, instance_id: str, age: int) -> None:
        generation = self.life(instance_id, age)
        if self.machine.cluster.current(instance_id, generation):
            self.leaving.add(instance_id)
        self.step(
            events.Reported(
                instance_id=instance_id, generation=generation, report=reports.Draining()
            )
        )

    @rule(instance_id=instance_ids, age=ages, cordoned=st.booleans())
    def cordon(self, instance_id: str, age: int, cordoned: bool) -> None:
        generation = self.life(instance_id, age)
        if self.machine.cluster.current(instance_id, generation):
            (self.cordoned.add if cordoned else self.cordoned.discard)(instance_id)
        self.step(
            events.InstanceCordoned(
                instance_id=instance_id, generation=generation, cordoned=cordoned
            )
        )

    @rule(data=st.data(), prompt_tokens=st.integers(65, 300))
    def a_home_is_cordoned(self, data: st.DataObject, prompt_tokens: int) -> None:
        """Cordons a decode instance while requests wait there for prefill."""
        for request_id in REQUESTS[:3]:
            self.submit(request_id, "x0", prompt_tokens, 5, 1, True)
        homes = sorted(set(self.placed_at.values()))
        if homes:
            instance_id = data.draw(st.sampled_from(homes))
            self.cordon(instance_id, 0, True)
            if data.draw(st.booleans()):
                self.cordon(instance_id, 0, False)

    @rule(instance_id=instance_ids, age=ages, free_pages=st.integers(0, 100))
    def heartbeat(self, instance_id: str, age: int, free_pages: int) -> None:
        self.step(
            events.Reported(
                instance_id=instance_id,
                generation=self.life(instance_id, age),
                report=reports.Heartbeat(free_pages=free_pages, running=1, waiting=2),
            )
        )

    @rule(
        instance_id=instance_ids,
        age=ages,
        family=st.integers(0, 1),
        blocks=st.integers(0, 20),
        whole=st.booleans(),
    )
    def tells_of_its_cache(
        self, instance_id: str, age: int, family: int, blocks: int, whole: bool
    ) -> None:
        """Reports a cache with some first blocks of a family of prompts; another's may be
        dropped."""
        added = prefix(family, blocks)
        removed = () if whole else prefix(1 - family, 20)
        if self.machine.cluster.current(instance_id, self.life(instance_id, age)):
            self.cached[instance_id] -= set(removed)
            self.cached[instance_id] = (set() if whole else self.cached[instance_id]) | set(added)
        cached = reports.CachedBlocks(whole=whole, added=added, removed=removed)
        self.step(
            events.Reported(
                instance_id=instance_id,
                generation=self.life(instance_id, age),
                report=cached,
            )
        )

    # ---- proxies

    @rule(
        request_id=request_ids,
        proxy_id=st.sampled_from(PROXIES),
        prompt_tokens=st.one_of(st.integers(1, 60), st.integers(65, 300)),
        max_new_tokens=st.one_of(st.integers(1, 20), st.just(0)),
        choices=st.integers(1, 2),
        resumable=st.sampled_from([True, True, True, False]),
        tbt_s=st.sampled_from([None, None, 0.03, 0.06]),
        family=st.integers(0, 2),
        ttft_s=st.sampled_from([None, None, 0.1, 1.0, 30.0]),
    )
    def submit(
        self,
        request_id: str,
        proxy_id: str,
        prompt_tokens: int,
        max_new_tokens: int,
        choices: int,
        resumable: bool,
        tbt_s: float | None = None,
        family: int = 0,
        ttft_s: float | None = None,
    ) -> None:
        queued, known = self.machine.queued, request_id in self.states
        if not known:  # else a double, which must change nothing
            self.states[request_id] = RequestState.QUEUED
            self.submitted[request_id] += 1
        request = Request(
            id=request_id,
            proxy_id=proxy_id,
            prompt_tokens=prompt_tokens,
            max_new_tokens=max_new_tokens,
            choices=choices,
            arrival_s=self.now_s,
            resumable=resumable,
            slo=Slo(ttft_s=ttft_s, tbt_s=tbt_s),
            prefix_hashes=prefix(family, prompt_tokens // BLOCK_TOKENS) if family < 2 else (),
        )
        self.step(events.Submitted(request=request))
        if not known and request_id in self.states:  # accepted
            most = self.config.max_queue_requests
            assert queued < (most if ttft_s is None else MOST_FULL * most)

    @rule(
        instance_id=st.sampled_from(PREFILLS + DECODES),
        request_id=request_ids,
        prompt_tokens=st.integers(65, 300),
    )
    def a_prompt_begins_alike(self, instance_id: str, request_id: str, prompt_tokens: int) -> None:
        """An instance has all of its blocks."""
        self.tells_of_its_cache(instance_id, 0, 0, 20, True)
        self.submit(request_id, "x0", prompt_tokens, 5, 1, True)

    @rule(
        request_id=request_ids,
        reason=st.sampled_from(["stop", "the client left"]),
        proxy_id=st.sampled_from(PROXIES),
    )
    def cancel(self, request_id: str, reason: str, proxy_id: str) -> None:
        known = self.machine.requests.get(request_id)
        cancel = events.CancelRequested(request_id=request_id, reason=reason, proxy_id=proxy_id)
        self.step(cancel)
        stays = known is not None and known.proxy_id != proxy_id
        assert (request_id in self.states) == stays

    @rule(policy=st.sampled_from(sorted(POLICIES)))
    def policy_changes(self, policy: str) -> None:
        live = set(self.machine.requests)
        self.step(events.PolicyChanged(policy=policy))
        assert self.machine.policy == policy and set(self.machine.requests) == live

    @rule(weight=st.floats(0.01, 100.0))
    def weights_change(self, weight: float) -> None:
        weights = Weights(classes={"default": weight}, tenants={"default": 1.0, "x": weight})
        self.step(events.WeightsChanged(weights=weights))
        assert self.machine.weights == weights

    @rule(rate=st.one_of(st.none(), st.floats(0, 1)), least=st.floats(0, 1))
    def rate_changes(self, rate: float | None, least: float) -> None:
        rows = ((0.0, least), (1.0, 1.0))
        self.step(events.ImprovementRateChanged(rate=rate, rows=rows))
        assert rate is None or self.machine.improvement_rate == rate

    @rule(proxy_id=st.sampled_from(PROXIES))
    def proxy_leaves(self, proxy_id: str) -> None:
        self.step(events.ProxyLeft(proxy_id=proxy_id))
        assert all(r.proxy_id != proxy_id for r in self.machine.requests.values())

    # ---- workers, in any order

    @rule(
        instance_id=instance_ids,
        age=ages,
        request_id=request_ids,
        index=st.integers(0, 2),
        last=st.booleans(),
        started=st.booleans(),
    )
    def chunk(
        self, instance_id: str, age: int, request_id: str, index: int, last: bool, started: bool
    ) -> None:
        generation = self.life(instance_id, age)
        if started:
            event: events.Event = events.Reported(
                instance_id=instance_id,
                generation=generation,
                report=reports.ChunkStarted(request_id=request_id, chunk_index=index),
            )
        else:
            event = events.Reported(
                instance_id=instance_id,
                generation=generation,
                report=reports.ChunkFinished(
                    request_id=request_id, chunk_index=index, compute_s=0.1, last=last
                ),
            )
        self.step(event)

    @rule(
        instance_id=instance_ids,
        age=ages,
        request_id=request_ids,
        complete=st.booleans(),
        attempts_ago=st.integers(0, 2),
    )
    def release(
        self,
        instance_id: str,
        age: int,
        request_id: str,
        complete: bool = False,
        attempts_ago: int = 0,
    ) -> None:
        generation = self.life(instance_id, age)
        attempt = self.told_of(instance_id, request_id, attempts_ago)
        if self.machine.cluster.current(instance_id, generation) and (
            instance_id in PREFILLS or attempts_ago == 0 or attempt == 0
        ):
            self.held[instance_id].discard(request_id)
            self.unqueue(instance_id, request_id)
        self.step(
            events.Reported(
                instance_id=instance_id,
                generation=generation,
                report=reports.RequestReleased(
                    request_id=request_id, complete=complete, attempt=attempt
                ),
            )
        )

    def told_of(self, instance_id: str, request_id: str, attempts_ago: int) -> int:
        """Draws the attempt that a decode instance had last, or an earlier one; 0: it names
        none."""
        return max(self.admitted.get((instance_id, request_id), 0) - attempts_ago, 0)

    @rule(
        instance_id=instance_ids,
        age=ages,
        request_id=request_ids,
        attempts_ago=st.integers(0, 2),
        tokens=st.integers(0, 300),
    )
    def prefix_lands(
        self, instance_id: str, age: int, request_id: str, attempts_ago: int, tokens: int
    ) -> None:
        self.step(
            events.Reported(
                instance_id=instance_id,
                generation=self.life(instance_id, age),
                report=reports.PrefixLanded(
                    request_id=request_id,
                    attempt=self.told_of(instance_id, request_id, attempts_ago),
                    tokens=tokens,
                ),
            )
        )

    @rule(
        instance_id=instance_ids,
        age=ages,
        request_id=request_ids,
        attempt=st.integers(0, 3),
        tokens=st.integers(0, 300),
    )
    def prompt_advances(
        self, instance_id: str, age: int, request_id: str, attempt: int, tokens: int
    ) -> None:
        self.step(
            events.Reported(
                instance_id=instance_id,
                generation=self.life(instance_id, age),
                report=reports.PromptAdvanced(
                    request_id=request_id, attempt=attempt, tokens=tokens
                ),
            )
        )

    @rule(instance_id=instance_ids, age=ages, request_id=request_ids)
    def decode_starts(self, instance_id: str, age: int, request_id: str) -> None:
        self.step(
            events.Reported(
                instance_id=instance_id,
                generation=self.life(instance_id, age),
                report=reports.DecodeStarted(request_id=request_id),
            )
        )

    @rule(
        instance_id=instance_ids,
        age=ages,
        request_id=request_ids,
        reason=reasons,
    )
    def finish(self, instance_id: str, age: int, request_id: str, reason: str) -> None:
        generation = self.life(instance_id, age)
        known = self.machine.cluster.current(instance_id, generation)
        holding = known.holdings.get(request_id) if known is not None else None
        if instance_id in DECODES and holding is not None and not holding.is_shard:
            self.held[instance_id].discard(request_id)
        self.step(
            events.Reported(
                instance_id=instance_id,
                generation=generation,
                report=reports.RequestFinished(
                    request_id=request_id, reason=reason, generated_tokens=3
                ),
            )
        )

    @rule(
        instance_id=instance_ids,
        age=ages,
        request_id=request_ids,
        retryable=st.booleans(),
        attempts_ago=st.integers(0, 2),
        kept_tokens=st.sampled_from([0, 0, 20, 100]),
        fault=st.sampled_from(["", "compute", "transfer"]),
    )
    def fail(
        self,
        instance_id: str,
        age: int,
        request_id: str,
        retryable: bool,
        attempts_ago: int = 0,
        kept_tokens: int = 0,
        fault: str = "",
    ) -> None:
        if self.machine.cluster.current(instance_id, self.life(instance_id, age)):
            self.unqueue(instance_id, request_id)
        self.step(
            events.Reported(
                instance_id=instance_id,
                generation=self.life(instance_id, age),
                report=reports.RequestFailed(
                    request_id=request_id,
                    message="out of luck",
                    retryable=retryable,
                    attempt=self.told_of(instance_id, request_id, attempts_ago),
                    kept_tokens=kept_tokens,
                    fault=fault,
                ),
            )
        )

    # ---- reports of workers about their requests, so that requests advance

    @rule(data=st.data(), words=st.integers(1, 6))
    def work_goes_on(self, data: st.DataObject, words: int) -> None:
        """Sends correct workers' next reports."""
        for _ in range(words):
            machine = self.machine
            pairs = sorted(
                (i.id, r) for i in machine.cluster.instances.values() for r in i.holdings
            )
            if not pairs:
                return
            instance_id, request_id = data.draw(st.sampled_from(pairs))
            instance = machine.cluster.instances[instance_id]
            request = machine.requests.get(request_id)
            if isinstance(instance, PrefillInstance):
                self.prefill_goes_on(instance, request_id, data)
            elif instance.holdings[request_id].is_shard:
                if request is None or request_id not in self.placed_at:
                    self.release(instance_id, 0, request_id)
            elif request is None or request.state is RequestState.DECODING:
                self.finish(instance_id, 0, request_id, "stop")
            elif request.state is RequestState.TRANSFERRING:
                self.decode_starts(instance_id, 0, request_id)
            elif request.state is RequestState.PREFILLING:
                tokens = data.draw(st.integers(1, request.prompt_tokens))
                self.prefix_lands(instance_id, 0, request_id, 0, tokens)
                if self.roles[instance_id] == "mixed":
                    self.chunk(instance_id, 0, request_id, 0, True, False)

    def prefill_goes_on(
        self, instance: PrefillInstance, request_id: str, data: st.DataObject
    ) -> None:
        tasks = [t for t in instance.queue if any(r.id == request_id for r in t.requests)]
        if not tasks:
            self.release(instance.id, 0, request_id, data.draw(st.booleans()))
            return
        task = tasks[0]
        if not (task.chosen and task.ready):
            return
        leader = task.members[0].id
        if task.started_s is None:
            self.chunk(leader, 0, request_id, task.chunk.index, False, True)
        elif data.draw(st.booleans()):
            self.chunk(leader, 0, request_id, task.chunk.index, True, False)
        else:
            self.suspend(leader, 0, request_id, task.chunk.index, 0.05)

    @rule(
        instance_id=instance_ids,
        age=ages,
        request_id=request_ids,
        index=st.integers(0, 2),
        compute_s=st.floats(0, 1),
    )
    def suspend(
        self, instance_id: str, age: int, request_id: str, index: int, compute_s: float
    ) -> None:
        self.step(
            events.Reported(
                instance_id=instance_id,
                generation=self.life(instance_id, age),
                report=reports.ChunkSuspended(
                    request_id=request_id, chunk_index=index, compute_s=compute_s
                ),
            )
        )

    @rule(data=st.data(), last=st.booleans())
    def work_goes_wrong(self, data: st.DataObject, last: bool) -> None:
        """Sends any report about a request that the instance really holds."""
        held = sorted(
            (i.id, r) for i in self.machine.cluster.instances.values() for r in i.holdings
        )
        if not held:
            return
        instance_id, request_id = data.draw(st.sampled_from(held))
        match data.draw(st.sampled_from(["release", "chunk", "start", "finish", "fail", "die"])):
            case "release":
                self.release(instance_id, 0, request_id, last)
            case "die":
                self.leave(instance_id, 0)
            case "chunk":
                self.chunk(instance_id, 0, request_id, 1, last, False)
            case "start":
                self.decode_starts(instance_id, 0, request_id)
            case "finish":
                self.finish(instance_id, 0, request_id, data.draw(reasons))
            case "fail":
                kept_tokens = data.draw(st.sampled_from([0, 100]))
                self.fail(instance_id, 0, request_id, last, 0, kept_tokens)

    @rule(data=st.data(), request_id=request_ids, prompt_tokens=st.integers(65, 300))
    def prefill_is_lost(self, data: st.DataObject, request_id: str, prompt_tokens: int) -> None:
        """Part of a long prompt has landed when a member dies or fails, or decode's transfer
        fails."""
        self.submit(request_id, "x0", prompt_tokens, 5, 1, True)
        request = self.machine.requests.get(request_id)
        if request is None or request.state is not RequestState.PREFILLING:
            return
        if request.decode_id is None:
            assert request.prefill_only
            return
        tokens = data.draw(st.integers(1, request.prompt_tokens))
        self.prefix_lands(request.decode_id, 0, request_id, 0, tokens)
        member = data.draw(st.sampled_from(request.chunks[-1].instance_ids))
        match data.draw(st.sampled_from(["part", "dies", "fails", "gives up", "decode fails"])):
            case "part":
                self.release(member, 0, request_id, True)
            case "dies":
                self.leave(member, 0)
            case "fails":
                self.fail(member, 0, request_id, True)
                self.release(member, 0, request_id)
            case "gives up":
                self.release(member, 0, request_id)
            case "decode fails":
                self.fail(request.decode_id, 0, request_id, True, 0, tokens)

    @rule(
        data=st.data(),
        request_id=request_ids,
        prompt_tokens=st.integers(65, 300),
        progress=st.integers(0, 4),
    )
    def a_kvp_worker_is_lost(
        self, data: st.DataObject, request_id: str, prompt_tokens: int, progress: int
    ) -> None:
        """Removes a KVP worker of a spread request, at any time."""
        self.submit(request_id, "x0", prompt_tokens, 20, 1, True)
        request = self.machine.requests.get(request_id)
        if request is None or not request.shards:
            return
        owner, *workers = request.kv_instance_ids
        for _ in range(progress):
            self.goes_on(request, data)
        worker = data.draw(st.sampled_from(workers))
        match data.draw(st.sampled_from(["dies", "gives up", "fails", "cordoned", "finish"])):
            case "dies":
                self.leave(worker, 0)
            case "gives up":
                self.release(worker, 0, request_id)
            case "fails":
                self.fail(worker, 0, request_id, data.draw(st.booleans()))
            case "cordoned":
                self.cordon(worker, 0, True)
            case "finish":
                self.finish(owner, 0, request_id, "stop")

    def goes_on(self, request: LiveRequest, data: st.DataObject) -> None:
        """Returns the next report of the instance that the request is at."""
        if request.state is RequestState.PREFILLING:
            leader = self.machine.cluster.instances[request.chunks[0].instance_ids[0]]
            if isinstance(leader, PrefillInstance):
                self.prefill_goes_on(leader, request.id, data)
            else:
                self.chunk(leader.id, 0, request.id, 0, True, False)
        elif request.state is RequestState.TRANSFERRING:
            self.decode_starts(request.kv_instance_ids[0], 0, request.id)

    @rule(instance_id=st.sampled_from(("p0", "p1", "p2")), request_id=request_ids)
    def a_prefill_comes_back(self, instance_id: str, request_id: str) -> None:
        """A prefill instance returns, and frees the requests that it was told to drop."""
        if instance_id not in self.machine.cluster.instances:
            self.join(instance_id, 1, 100, "h", 4)
        holding = self.machine.cluster.instances[instance_id].holdings.get(request_id)
        if holding is not None and holding.leaving:
            self.release(instance_id, 0, request_id)

    @rule(seconds=st.floats(0.0, 8.0))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.forget_unreleased()
        self.step(events.Tick())

    def forget_unreleased(self) -> None:
        """Past `release_timeout_s` the machine may send a request again to an instance that never
        freed it.
        """
        for instance in self.machine.cluster.instances.values():
            for request_id, holding in instance.holdings.items():
                if holding.leaving:
                    self.held[instance.id].discard(request_id)
                    self.unqueue(instance.id, request_id)

    # ---- what always holds

    @invariant()
    def is_sound(self) -> None:
        self.machine.check_integrity()
        assert {r.id: r.state for r in self.machine.requests.values()} == self.states
        for r in REQUESTS:
            assert self.submitted[r] == self.ends[r] + (r in self.states)
        instances = self.machine.cluster.instances.values()
        assert {i.id for i in instances if i.draining} == self.leaving | self.cordoned
        self.queues_are_as_told()

    def queues_are_as_told(self) -> None:
        """An instance that obeys has the queue that the machine expects."""
        for instance in self.machine.cluster.instances.values():
            if not isinstance(instance, PrefillInstance):
                continue
            believed = [
                tuple((request.id, task.chunk.index) for request in task.requests)
                for task in instance.queue
            ]
            known = {ref for entry in believed for ref in entry}
            told = [
                tuple(ref for ref in entry if ref in known) for entry in self.queues[instance.id]
            ]
            assert [entry for entry in told if entry] == believed

    @invariant()
    def has_missed_nothing(self) -> None:
        """Each event places or dispatches all that it made possible, by itself.

        Where a policy's keys change with the last decision (a plan replaces the prediction of
        slack), another round may find more, but not for ever.
        """
        looks = 1 if self.machine.policy in STATIC else len(REQUESTS) + 1
        for _ in range(looks):
            found = self.machine.step(events.Tick(), self.now_s)
            for effect in found:
                self.see(effect)
            if not any(isinstance(e, effects.Place | effects.RunPrefill) for e in found):
                break
        else:
            raise AssertionError(f"still finds {found}")
        assert looks > 1 or found == []

    def teardown(self) -> None:
        """Time alone brings everything to an end, and nothing stays reserved."""
        self.now_s += TIMEOUT_S + 1
        self.step(events.Tick())
        assert not self.machine.requests and not self.states
        self.now_s += RELEASE_S + 1
        self.step(events.Tick())
        self.machine.check_integrity()
        assert self.machine.queued == 0 and self.machine.queued_s == 0.0
        for instance in self.machine.cluster.instances.values():
            assert not instance.holdings
        assert self.submitted == self.ends


BUDGET = settings(
    max_examples=50,
    stateful_step_count=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_any_sequence_of_events_leaves_the_machine_sound() -> None:
    run_state_machine_as_test(World, settings=BUDGET)


@pytest.mark.slow
def test_many_long_sequences_leave_the_machine_sound() -> None:
    run_state_machine_as_test(
        World, settings=settings(BUDGET, max_examples=500, stateful_step_count=120)
    )
