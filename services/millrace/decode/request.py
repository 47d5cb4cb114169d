"""One request's stay at a decode instance."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from millrace.decode.token_streams import Life, life_of
from millrace.engine.sampling_spec import SamplingSpec
from millrace.wire.pb import common_pb2
from millrace.worker.codec import Stopwatch, sampling_spec


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """What the instance holds for a request, from its admission to its release.

    `pages` are all pages reserved for it; the first ones hold the prompt, in token order.
    """

    spec: common_pb2.RequestSpec
    sampling: SamplingSpec
    clock: Stopwatch
    proxy: Life
    pages: list[int]
    admitted_s: float
    first_token_ids: list[int] = field(default_factory=list)
    spans: list[common_pb2.Span] = field(default_factory=list)
    prompt_ids: npt.NDArray[np.int32] | None = None
    landed: bool = False
    joined: bool = False
    ended: bool = False
    open_choices: set[int] = field(default_factory=set)
    generated_tokens: int = 0
    finish_reason: str = ""
    first_step_s: float | None = None

    @staticmethod
    def of(spec: common_pb2.RequestSpec, pages: list[int]) -> DecodeRequest:
        clock = Stopwatch(spec.arrival_unix_s)
        return DecodeRequest(
            spec=spec,
            sampling=sampling_spec(spec.sampling),
            clock=clock,
            proxy=life_of(spec.proxy),
            pages=pages,
            admitted_s=clock.now_s(),
        )

    @property
    def id(self) -> str:
        return self.spec.request_id

    @property
    def prompt_tokens(self) -> int:
        return self.spec.prompt_tokens

    @property
    def can_join(self) -> bool:
        """Whether all it needs to decode is here: the KV, token one, the prompt for penalties."""
        has_prompt = self.prompt_ids is not None or not self.sampling.needs_prompt_ids
        return self.landed and bool(self.first_token_ids) and has_prompt and not self.ended
