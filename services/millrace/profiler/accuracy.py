"""Compares a profile with the measured times, above all those that it was not fitted to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

from millrace.core.cost.operators import BatchShape
from millrace.core.cost.profile import Profile
from millrace.core.kv.sp_layout import pass_tokens
from millrace.profiler.groups.measure import MeasuredGroups
from millrace.profiler.measure import Case, Measured, Prefill
from millrace.profiles import decode_step
from millrace.profiles.eq_1 import rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One measured time and the profile's prediction.

    model: prefill (Eq. (1) with its points), sp2 and up (the same for groups); from the operator
    tables: operators (one prompt), batched (several prompts in one pass), decode, mixed (a chunk
    beside decodes); or decode_step, the straight line that a decode instance registers.
    """

    model: str
    case: Case
    is_held_out: bool
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """The relative error, above 0 if the prediction is too large."""
        return self.predicted_s / self.measured_s - 1.0


def compare(
    profile: Profile,
    measured: Measured,
    max_chunk_tokens: int,
    groups: MeasuredGroups | None = None,
) -> list[Compared]:
    """Compares every measured case with every model that predicts it."""
    operators = profile.operators
    found: list[Compared] = []

    def add(
        model: str,
        case: Case,
        measured_s: float,
        predicted_s: float,
        held_out: frozenset[Prefill] | frozenset[Case] = measured.held_out,
    ) -> None:
        found.append(
            Compared(
                model=model,
                case=case,
                is_held_out=case in held_out,
                measured_s=measured_s,
                predicted_s=predicted_s,
            )
        )

    for case, timing in sorted(measured.prefills.items()):
        if case.batch > 1:
            together = BatchShape(prefills=((case.tokens, case.history),) * case.batch)
            add("batched", case, timing.seconds, operators.pass_s(together))
            continue
        add("prefill", case, timing.seconds, profile.prefill.chunk_s(case.tokens, case.history))
        parts = pass_tokens(case.tokens, 1, max_chunk_tokens)
        starts = accumulate(parts, initial=case.history)
        shapes = [BatchShape(prefills=(part,)) for part in zip(parts, starts, strict=False)]
        add("operators", case, timing.seconds, sum(map(operators.pass_s, shapes)))
    base_s, per_sequence_s, per_context_token_s = decode_step.of_profile(operators)
    for step, step_s in sorted(measured.decode_s.items()):
        context = step.batch * step.context
        add("decode", step, step_s, operators.decode_step_s(step.batch, context))
        straight_s = base_s + per_sequence_s * step.batch + per_context_token_s * context
        add("decode_step", step, step_s, straight_s)
    for batch, pass_s in sorted(measured.mixed_s.items()):
        add("mixed", batch, pass_s, profile.mixed_batches.pass_s(batch.shape))
    if groups is not None:
        for sp, of_sp in groups.seconds.items():
            for case, taken_s in of_sp.items():
                predicted_s = profile.prefill.chunk_s(case.tokens, case.history, sp)
                add(f"sp{sp}", case, taken_s, predicted_s, groups.held_out)
    return found


def errors(compared: Iterable[Compared]) -> dict[str, float]:
    """Returns each model's median relative error on held-out cases, the worst as MODEL_worst."""
    by_model: dict[str, list[float]] = {}
    for one in compared:
        if one.is_held_out:
            by_model.setdefault(one.model, []).append(abs(one.error))
    stated = {}
    for model, values in sorted(by_model.items()):
        stated[model] = rounded(median(values))
        stated[f"{model}_worst"] = rounded(max(values))
    return stated
