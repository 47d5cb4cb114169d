"""A decode step whose tokens are still on the device."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millrace.engine.device.copies import upload
from millrace.engine.sampling.sampler import Sampling
from millrace.engine.sampling.spec import SamplingRow
from millrace.engine.sequence import Sequence, TokenOut

Slots = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class StepInFlight:
    """The step, with the sequences that it computes.

    `left`: the sequences that ended in the step before, whose tokens here nobody wants. `late`:
    their last tokens, which wait for this step, because it writes to their pages.
    """

    sequences: list[Sequence]
    rows: list[SamplingRow]
    sampling: Sampling
    left: set[Sequence] = field(default_factory=set)
    late: list[TokenOut] = field(default_factory=list)

    def writes_to(self, request_id: str) -> bool:
        """Returns whether the step writes to pages of the request."""
        return any(sequence.request_id == request_id for sequence in self.sequences)

    def feed(self, sources: Slots, token_ids: Slots) -> Tensor:
        """Returns the next step's tokens, int64 [b] on the device: of this step's number
        `sources` [b], or, where that is -1, of `token_ids` [b] on the host."""
        chosen = self.sampling.token_ids
        if len(sources) == len(chosen) and np.array_equal(sources, np.arange(len(sources))):
            return chosen
        own = len(chosen) + np.arange(len(sources))
        index, fed = upload(
            chosen.device,
            torch.from_numpy(np.where(sources < 0, own, sources)),
            torch.from_numpy(token_ids),
        )
        return torch.cat((chosen, fed)).index_select(0, index)
