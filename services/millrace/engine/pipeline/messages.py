"""Commands of the first stage to later stages, and their answers, over a pipe to each stage.

Rows go from stage to stage separately (`rows`); both name a pass by its number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millrace.core.kv.layout import KvLayout
from millrace.engine.attention.kvp_owner import Partial
from millrace.engine.parallel.commands import RingPass, Tables


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor of any dtype, as bytes of a message."""

    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, tensor: Tensor) -> Packed:
        # The source may change, or be on a device.
        flat = tensor.clone().contiguous().cpu().view(-1).view(torch.uint8)
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.numpy())

    def tensor(self) -> Tensor:
        flat = torch.from_numpy(self.data)
        return flat.view(getattr(torch, self.dtype)).view(self.shape)


@dataclass(frozen=True, slots=True)
class PartialMessage:
    """A `Partial` as a message."""

    rows: Packed | slice
    out: Packed
    lse: Packed

    @classmethod
    def of(cls, part: Partial) -> PartialMessage:
        rows = part.rows if isinstance(part.rows, slice) else Packed.of(part.rows)
        return cls(rows, Packed.of(part.out), Packed.of(part.lse))

    def partial(self) -> Partial:
        rows = self.rows if isinstance(self.rows, slice) else self.rows.tensor()
        return Partial(rows, self.out.tensor(), self.lse.tensor())


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Make a pool over your layers of the instance's. With `is_shared` the memory of all stages'
    pools follows, as a file descriptor; else the pool has memory of its own."""

    layout: KvLayout  # of all layers, rank 0's part
    attention_backend: str
    is_shared: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PassStart:
    """Rows of this number will be handed on to you. `name`: as in `PassOrder`.

    `is_cut` and `kv_only` as of `Passes.run`. `reports_layers`: answer each layer of the pass
    with `LayerDone`.
    """

    number: int
    name: str
    tables: Tables
    is_cut: bool
    kv_only: bool
    reports_layers: bool


@dataclass(frozen=True, slots=True)
class RingStart:
    """A pass of an SP group; its rows, if any, come as those of a `PassStart`.

    Every step of the pass waits for a `Step`, because the step waits for other instances, which may
    have stopped before.
    """

    number: int
    name: str
    task: RingPass


@dataclass(frozen=True, slots=True)
class Step:
    """Run the next operator of a `RingStart`; the answer is `Stepped`, after `LinkCall`s."""

    number: int


@dataclass(frozen=True, slots=True)
class LinkReply:
    """The result of a `LinkCall` or a `RemoteCall`; the parts where the call asked for partials."""

    value: bool | tuple[PartialMessage, ...]


@dataclass(frozen=True, slots=True)
class PassOrder:
    """The order of passes, by name and then by number. Passes of other names come last, passes
    named "" first.
    """

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """Give the pass up. With `comes` its rows are here or on their way; else they never come."""

    number: int
    comes: bool


@dataclass(frozen=True, slots=True)
class Done:
    """Reports that `Load` or `Open` was carried out."""


@dataclass(frozen=True, slots=True)
class LayerDone:
    """Reports that the KV of a layer, counted over the whole model, lies in its pages."""

    number: int
    layer: int


@dataclass(frozen=True, slots=True)
class LinkCall:
    """Make this call of the pass's `RingLink`, which is at the first stage. `argument`: a layer of
    the model, or a step of the ring."""

    method: str
    argument: int


@dataclass(frozen=True, slots=True)
class RemoteCall:
    """Make this call of the `RemoteLink`, which is at the first stage: `send` of a layer of the
    model, with q, or, without, `partials`. `kv`: the layer's new K/V, of a stage with a pool of its
    own."""

    layer: int
    q: Packed | None
    kv: Packed | None = None


@dataclass(frozen=True, slots=True)
class Stepped:
    """An operator of the model's `layer` has run. With `operator` "" there was none left."""

    number: int
    layer: int
    operator: str


@dataclass(frozen=True, slots=True)
class Through:
    """The pass has ended at the last stage, with nothing to hand on."""

    number: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """The answer to `Drop`: whether the stage had handed the pass on before."""

    number: int
    handed_on: bool


@dataclass(frozen=True, slots=True)
class CopyPage:
    """Copy a page of your pool to another page, between two operators."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Copied:
    """The answer to `CopyPage`: later passes find the copy."""


@dataclass(frozen=True, slots=True)
class Died:
    """A stage's last message: why the stage has failed."""

    error: str


Command = PassStart | RingStart | Step | LinkReply | PassOrder | Drop | CopyPage
Answer = LayerDone | LinkCall | RemoteCall | Stepped | Through | Dropped | Copied | Died
