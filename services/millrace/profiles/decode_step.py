"""Fits a decode step's seconds: base + per_sequence n + per_context_token C.

n is the number of sequences of the batch, C the number of their context tokens in total: Mnemosyne
section 4.4 takes decode attention as linear in the context (T_d^attn(n) of Eq. (9)), and weights
are read once per step for any batch. A decode instance registers with this fit, so that the
scheduler can predict a step with one more request.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from millrace.core.cost.operators import OperatorModel
from millrace.profiles.eq_1 import rounded


def fit(steps: Sequence[tuple[int, int, float]]) -> tuple[float, float, float]:
    """Returns (base_s, per_sequence_s, per_context_token_s), none below 0.

    steps: (sequences, their context tokens in total, seconds), one or more. Least squares on
    relative error; a term that would be negative is left out, and so is that of sequences where
    all steps have as many.
    """
    seconds = np.array([step[2] for step in steps])
    basis = np.array([(1.0, sequences, context) for sequences, context, _ in steps])
    basis /= seconds[:, None]
    keep = [0, 1, 2] if len({step[0] for step in steps}) > 1 else [0, 2]
    while True:
        found = np.linalg.lstsq(basis[:, keep], np.ones(len(steps)), rcond=None)[0]
        if (found >= 0).all():
            break
        keep.pop(int(found.argmin()))
    terms = dict(zip(keep, map(rounded, found.tolist()), strict=True))
    return terms.get(0, 0.0), terms.get(1, 0.0), terms.get(2, 0.0)


def of_profile(operators: OperatorModel) -> tuple[float, float, float]:
    """Returns `fit` over the steps in a profile's tables."""
    decode = operators.decode_attn
    return fit(
        [
            (batch, round(context), operators.decode_step_s(batch, round(context)))
            for batch, table in zip(decode.batches, decode.tables, strict=True)
            for context in table.xs
        ]
    )
