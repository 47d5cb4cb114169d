"""Chooses the chunks of the next iteration: Medha's packer with this instance's settings and clock.

Prompts wait in the order of the configured policy, which ranks them as the scheduler ranks
requests: by deadline and remaining work, by Medha's Algorithm 3 under adaptive chunking.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from millrace.colocated.predictor import Predictor
from millrace.colocated.prompt_spans import PromptSpans
from millrace.core.config import Config
from millrace.core.cost.operators import BatchShape, OperatorModel
from millrace.core.cost.prefill_times import ChunkLimits, PrefillTimes
from millrace.core.errors import ConfigError
from millrace.core.instance.group import PromptLogprobsRun
from millrace.core.instance.packing import Packer, PackingConfig
from millrace.core.instance.prompt_order import PromptOrder
from millrace.core.instance.prompt_steps import PromptSteps
from millrace.core.live_request import LiveRequest
from millrace.core.priority import POLICIES
from millrace.core.priority.lars import relative_slack
from millrace.core.request import Request
from millrace.core.scheduler.outcomes.objectives import allowed_s
from millrace.core.weights import Weights
from millrace.decode.request import DecodeRequest
from millrace.prefill.hidden_pool import HiddenPool

log = logging.getLogger(__name__)

_GRANULARITY: Final = 256  # tokens between entries of Algorithm 3's table


@dataclass(slots=True, eq=False, kw_only=True)
class Prompt:
    """A prompt that the instance computes.

    `standing` is the policy's view of the prompt; its times are of time.monotonic.
    """

    request: DecodeRequest
    ids: torch.Tensor  # int64 [prompt_tokens] on the CPU
    pages: npt.NDArray[np.int32]  # of choice 0, which holds the whole prompt
    standing: LiveRequest
    spans: PromptSpans
    done: int = 0  # tokens whose KV is computed or cached
    compute_s: float = 0.0  # of the iterations that had a chunk of it
    logprobs: list[PromptLogprobsRun] = field(default_factory=list)
    steps: PromptSteps = field(default_factory=PromptSteps)
    hidden_pool: HiddenPool = field(init=False)

    def __post_init__(self) -> None:
        self.hidden_pool = HiddenPool(self.request.spec.pooling)

    @property
    def prompt_tokens(self) -> int:
        return self.request.prompt_tokens


@dataclass(frozen=True, slots=True)
class Share:
    """A prompt's share of an iteration."""

    prompt: Prompt
    tokens: int

    @property
    def is_last(self) -> bool:
        return self.prompt.done + self.tokens == self.prompt.prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """An iteration's shares of prompts, and its predicted times.

    shape: with decodes. yielded: the share of t_target that a long prefill left to other prompts.
    """

    shares: list[Share]
    shape: BatchShape
    t_target_s: float
    predicted_s: float
    yielded: float


def packing_config(config: Config) -> PackingConfig:
    """Converts the settings of section mixed for the packer. Raises ConfigError."""
    mixed, engine = config.mixed, config.engine
    step = mixed.chunk_step_tokens
    most = engine.max_chunk_tokens // step * step
    if most < mixed.min_chunk_tokens:
        raise ConfigError(
            f"engine.max_chunk_tokens is {engine.max_chunk_tokens}; it must hold a chunk of "
            f"mixed.min_chunk_tokens ({mixed.min_chunk_tokens}) in steps of "
            f"mixed.chunk_step_tokens ({step})"
        )
    return PackingConfig(
        t_target_s=mixed.t_target_ms / 1e3,
        rho_max=mixed.max_yield,
        min_chunk_tokens=mixed.min_chunk_tokens,
        max_chunk_tokens=most,
        granularity=step,
        long_kv_tokens=mixed.long_kv_tokens,
        max_batch=engine.max_batch,
        adaptive=mixed.chunking == "adaptive",
        fixed_chunk_tokens=min(mixed.static_chunk_tokens, engine.max_chunk_tokens),
        multi_prefill=mixed.multi_prefill == "on",
    )


class IterationPacker:
    """Ranks the prompts and packs an iteration."""

    def __init__(
        self,
        operators: OperatorModel,
        predictor: Predictor,
        config: Config,
        most_spread_tokens: int,
    ) -> None:
        """`most_spread_tokens`: most tokens of spread prompts in one iteration.

        Raises ConfigError for settings that contradict each other.
        """
        self._predictor = predictor
        self._config = packing_config(config)
        self._idle_target_s = config.mixed.idle_target_ms / 1e3
        self._packer = Packer(predictor, self._config)
        self._most_tokens = config.engine.max_chunk_tokens
        self._most_spread_tokens = most_spread_tokens
        self._order = PromptOrder(config.scheduler.policy)
        self._times = PrefillTimes(
            operators,
            target_s=self._config.t_target_s,
            granularity=_GRANULARITY,
            limits=_limits(self._config),
        )

    def rank_by(self, policy: str, weights: Weights, now_s: float) -> None:
        """Ranks prompts by this policy from now on, if the policy is known, with these weights."""
        self._order.weigh(weights)
        if policy == self._order.policy:
            return
        if policy in POLICIES:
            self._order.rank_by(policy, now_s)
        else:  # from a scheduler of another version
            log.warning("policy %r is unknown: %s stays", policy, self._order.policy)

    def standing(self, request: DecodeRequest, order: int) -> LiveRequest:
        """Builds the policy's view of the `order`th prompt, before any computation."""
        spec = request.spec
        predicted_s = self._times.total_s(request.prompt_tokens) * self._predictor.factor
        asked = Request(
            id=request.id,
            proxy_id=spec.proxy.id,
            prompt_tokens=request.prompt_tokens,
            max_new_tokens=spec.sampling.max_tokens,
            choices=spec.sampling.n,
            slo=spec.slo,
            arrival_s=request.clock.arrival_s,
            tenant=spec.tenant,
            priority=spec.priority,
        )
        found = LiveRequest(asked)
        found.predict(predicted_s, predicted_s)
        found.expect(request.expected_tokens)
        step_s = min(spec.slo.tbt_s or math.inf, self._config.t_target_s)
        found.due_by(asked.arrival_s + allowed_s(found, step_s))
        found.accept(order)
        return found

    def advance(self, prompt: Prompt, tokens: int) -> None:
        """Notes that `tokens` more tokens of the prompt are computed."""
        prompt.done += tokens
        total, standing = prompt.prompt_tokens, prompt.standing
        left = self._times.remaining_s(total, prompt.done) / self._times.total_s(total)
        standing.suspend(standing.predicted_prefill_s * (1.0 - left))
        self._order.started(standing)

    def computed(self, prompt: Prompt, now_s: float) -> None:
        """Notes that the prompt has its first token; `now_s` is of time.monotonic."""
        self._order.computed(prompt.standing, now_s)

    def alone_s(self, request: DecodeRequest) -> float:
        """Predicts the seconds of an iteration that decodes the request alone."""
        shape = BatchShape(
            decodes=len(request.open_choices), decode_context_tokens=request.context_tokens
        )
        return self._predictor.pass_s(shape)

    def pack(
        self,
        prompts: Sequence[Prompt],
        now_s: float,
        *,
        decodes: int = 0,
        context_tokens: int = 0,
        pace_s: float = math.inf,
    ) -> Plan:
        """Plans the next iteration beside `decodes` with `context_tokens` in total.

        pace_s: the tightest pace of the decodes; a finite pace replaces t_target. Without decodes
        no answer waits for the pass: t_target is `mixed.idle_target_ms` then, since longer chunks
        make better use of the weights that a pass reads. now_s: since the epoch.
        """
        yielded = 0.0

        def slack(standing: LiveRequest) -> float:
            nonlocal yielded
            rho = relative_slack(standing, now_s)
            yielded = max(yielded, min(self._config.rho_max, max(0.0, rho)))
            return rho

        target_s = pace_s if pace_s < math.inf else self._config.t_target_s
        if not decodes:
            target_s = self._idle_target_s
        by_id = {prompt.request.id: prompt for prompt in prompts}
        packed = self._packer.within(target_s).pack(
            decodes,
            context_tokens,
            [(prompt.standing, prompt.done) for prompt in self._ranked(by_id, now_s)],
            slack,
        )
        shares = self._within_pass([Share(by_id[one.id], tokens) for one, tokens in packed])
        shape = BatchShape(
            prefills=tuple((share.tokens, share.prompt.done) for share in shares),
            decodes=decodes,
            decode_context_tokens=context_tokens,
        )
        return Plan(
            shares=shares,
            shape=shape,
            t_target_s=target_s,
            predicted_s=self._predictor.pass_s(shape),
            yielded=yielded,
        )

    def _ranked(self, by_id: dict[str, Prompt], now_s: float) -> list[Prompt]:
        self._order.keep_only(by_id, now_s)
        for prompt in by_id.values():
            if prompt.standing not in self._order:
                self._order.add(prompt.standing, now_s)
        return [by_id[one.id] for one in self._order.ordered(now_s)]

    def _within_pass(self, shares: list[Share]) -> list[Share]:
        """Cuts the shares to the tokens that a pass may have."""
        room, spread_room = self._most_tokens, self._most_spread_tokens
        fitting: list[Share] = []
        for share in shares:
            is_spread = share.prompt.request.is_spread
            tokens = min(share.tokens, room, spread_room if is_spread else room)
            if tokens:
                fitting.append(Share(share.prompt, tokens))
                room -= tokens
                spread_room -= tokens if is_spread else 0
        return fitting


def _limits(config: PackingConfig) -> ChunkLimits:
    if config.adaptive:
        least, most, step = config.min_chunk_tokens, config.max_chunk_tokens, config.granularity
        return ChunkLimits(least=least, most=most, step=step)
    return ChunkLimits(least=config.fixed_chunk_tokens, most=config.fixed_chunk_tokens, step=1)
