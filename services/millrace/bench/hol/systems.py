"""The systems that `millrace bench hol` compares, with their settings in the live stack and in
`sim`.

FlowPrefill section 6.1: DistServe with first come first served; the same with EDF and chunks of
2,048 and 8,192 tokens; FlowPrefill. Ours computes prompts in the larger chunks (section 6.5),
because an operator of a shorter pass delays others for less time. Token counts are divided by the
run's scale, as lengths are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Tokens of a forward pass that takes every prompt whole.
WHOLE_TOKENS = 1 << 20

#: FlowPrefill section 6.1 and figure 11: chunks, and the budget of a batch.
SMALL_CHUNK_TOKENS, LARGE_CHUNK_TOKENS, BATCH_TOKENS = 2048, 8192, 2048

FCFS = "fcfs"
OURS = "millrace"
NAMES = (FCFS, "edf-small", "edf-large", "s-edf", OURS)


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A way to schedule prefill; a forward pass has at most `chunk_tokens`."""

    name: str
    policy: str
    preemption: str
    chunk_tokens: int = WHOLE_TOKENS
    batch_tokens: int = 0

    @property
    def settings(self) -> list[str]:
        """Returns `section.field=value` for every service."""
        return [
            f"scheduler.policy={self.policy}",
            f"scheduler.preemption={self.preemption}",
            f"scheduler.batch_tokens={self.batch_tokens}",
            f"engine.max_chunk_tokens={self.chunk_tokens}",
        ]


def systems(names: Sequence[str], scale: float) -> list[System]:
    """Returns the systems with these names, in the order of `NAMES`; token counts over `scale`."""

    def scaled(tokens: int) -> int:
        return max(1, round(tokens / scale))

    batch = scaled(BATCH_TOKENS)
    small, large = scaled(SMALL_CHUNK_TOKENS), scaled(LARGE_CHUNK_TOKENS)
    found = (
        System(name=FCFS, policy="fcfs", preemption="none"),
        System(name="edf-small", policy="edf", preemption="chunk", chunk_tokens=small),
        System(name="edf-large", policy="edf", preemption="chunk", chunk_tokens=large),
        System(name="s-edf", policy="s_edf", preemption="operator", batch_tokens=batch),
        System(
            name=OURS,
            policy="millrace",
            preemption="operator",
            chunk_tokens=large,
            batch_tokens=batch,
        ),
    )
    return [system for system in found if system.name in names]
