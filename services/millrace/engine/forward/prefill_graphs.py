"""Short passes over prompts on a GPU: CUDA graphs of all that lies between two attentions.

A pass of a few rows takes the host longer than the device: some nine launches for each layer. A
graph takes all of them but attention's: the projection after an attention, the MLP, the next
layer's QKV projection, its rotation and K/V write. Attention stays outside, because its launches
depend on histories and on the sequences of the pass. A graph has a number of rows; a pass takes
the smallest with room for its rows, and the remaining rows are padding, whose K/V goes nowhere.

All passes share one memory for what goes from one graph to the next. A pass may be suspended at any
boundary, and another pass may take the memory; then the rows of the first are copied out, and back
when it resumes.

Shape letters are those of `millrace.engine.model.operators`; R rows of a graph.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from millrace.engine.device.graphs import Graph, Graphs
from millrace.engine.forward.mixed_pass import RaggedTables
from millrace.engine.forward.pass_states import PassStates
from millrace.engine.forward.passes import Boundary
from millrace.engine.kv.step_tables import NOWHERE
from millrace.engine.model.loader import Model
from millrace.engine.model.operators import Activations, Operator, Run, required

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Step:
    """The work of a pass from one boundary to the next, `boundary`."""

    run: Run
    boundary: Boundary


class PrefillGraphs:
    """The graphs of a model in one stage on a CUDA device."""

    def __init__(self, model: Model, states: PassStates, operators: Sequence[Operator]) -> None:
        """operators: of the whole model."""
        self._model = model
        self._states = states
        self._pieces = _pieces(operators)
        self._memory: _Memory | None = None
        self._graphs: dict[int, Sequence[Graph[None]]] = {}  # by R, ascending; of each piece
        self._without = "off"

    def capture(self, rows: Sequence[int]) -> None:
        """Captures the graphs of these numbers of rows, ascending. Where that fails, passes run
        operator by operator, and the log says why. A second call does nothing."""
        if not rows or self._graphs:
            return
        torch.cuda.empty_cache()  # as a capture does: what is reserved from now on is the graphs'
        before = torch.cuda.memory_reserved(self._model.device)
        try:
            self._memory = _Memory(self._model, rows[-1])
            self._graphs = self._captured(self._memory, rows)
        except Exception as error:  # any error of CUDA, of its memory, of Triton
            self._memory, self._graphs, self._without = None, {}, "failed"
            log.warning("short prefills run without CUDA graphs: their capture failed: %s", error)
            return
        log.info(
            "short prefills by CUDA graphs of %s rows: %d graphs, %.0f MiB of the GPU's memory, of "
            "which %.0f MiB go from graph to graph",
            ", ".join(map(str, rows)),
            len(rows) * len(self._pieces),
            (torch.cuda.memory_reserved(self._model.device) - before) / (1 << 20),
            self._memory.rows.bytes / (1 << 20),
        )

    def begin(self, tables: RaggedTables, state: Activations) -> GraphPass | None:
        """Begins a pass by graphs; None where none fits, for the reason that is counted."""
        size = len(tables.token_ids)
        rows = next((rows for rows in self._graphs if rows >= size), None)
        if self._memory is None or rows is None or tables.remote:
            reason = "remote" if tables.remote else "rows"
            self.count_eager(self._without if self._memory is None else reason)
            return None
        self._states.prefills.graph += 1
        padding = self._memory.rows.slots[size:rows]
        return GraphPass(self._memory, self._pieces, self._graphs[rows], state, padding)

    def count_eager(self, reason: str) -> None:
        """Counts a pass operator by operator."""
        self._states.prefills.eager[reason] += 1

    def _captured(self, memory: _Memory, rows: Sequence[int]) -> dict[int, Sequence[Graph[None]]]:
        graphs, found = Graphs(), {}
        for size in reversed(rows):  # the largest first: the others fit into its memory
            works = [partial(_compute, piece, memory.rows.first(size)) for piece in self._pieces]
            for work in works:  # loads the kernels; the slots are nowhere, so no K/V is written
                work()
            found[size] = [graphs.capture(work, is_warm=True) for work in works]
        return dict(sorted(found.items()))


class GraphPass:
    """One pass by graphs, and its part of the shared memory."""

    def __init__(
        self,
        memory: _Memory,
        pieces: Sequence[_Piece],
        graphs: Sequence[Graph[None]],
        state: Activations,
        padding: Tensor,
    ) -> None:
        """padding: the slots of the graphs' remaining rows."""
        self._memory = memory
        self._pieces = pieces
        self._graphs = graphs
        self._padding = padding
        self._own = memory.rows.first(state.num_tokens)
        self._given = (state.slots, state.cos, state.sin)
        self._kept: list[Tensor] | None = None  # copied out of the memory

    def steps(self) -> Iterator[Step]:
        """Yields the steps of all layers, up to the last ``attn``."""
        for number, piece in enumerate(self._pieces):
            yield Step(partial(self._replay, number), piece.boundary)
            yield Step(required(piece.attn.halves)[1], Boundary(piece.attn.layer, "attn"))

    def resume(self) -> None:
        """Makes the memory this pass's, whichever pass has had it. Called before each step."""
        memory, own = self._memory, self._own
        if memory.owner is self:
            return
        if memory.owner is not None:
            memory.owner._leave()
        memory.owner = self
        self._padding.fill_(NOWHERE)
        for table, given in zip((own.slots, own.cos, own.sin), self._given, strict=True):
            table.copy_(given)
        if self._kept is not None:
            for rows, kept in zip(own.carried, self._kept, strict=True):
                rows.copy_(kept)
            self._kept = None

    def end(self) -> None:
        """Gives the memory up, wherever the pass ends."""
        self._kept = None
        if self._memory.owner is self:
            self._memory.owner = None

    def _leave(self) -> None:
        self._kept = [rows.clone() for rows in self._own.carried]

    def _replay(self, number: int, state: Activations) -> None:
        own = self._own
        if number:
            del state.attended  # it lies in the memory
        else:
            own.residual.copy_(state.x)
            del state.x
        self._graphs[number].replay()
        state.residual, state.qkv, state.q, state.into = own.residual, own.qkv, own.q, own.attended


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one graph of a number of rows computes: operators, and the rotation of the ``attn``
    after them."""

    operators: Sequence[Operator]
    attn: Operator
    boundary: Boundary


@dataclass(frozen=True, slots=True)
class _Rows:
    """What goes from one graph to the next, for R rows."""

    slots: Tensor  # int64 [R]
    cos: Tensor  # float32 [R, d / 2]
    sin: Tensor  # float32 [R, d / 2]
    residual: Tensor  # [R, H]
    qkv: Tensor  # [R, (h + 2k) d]
    q: Tensor  # [R, h, d], a view of `qkv`
    attended: Tensor  # [R, h d]

    @property
    def carried(self) -> Sequence[Tensor]:
        """What a suspended pass needs."""
        return self.residual, self.qkv, self.attended

    @property
    def bytes(self) -> int:
        parts = (self.slots, self.cos, self.sin, *self.carried)
        return sum(part.numel() * part.element_size() for part in parts)

    def first(self, rows: int) -> _Rows:
        """Returns the first rows of the same memory."""
        return _Rows(
            self.slots[:rows],
            self.cos[:rows],
            self.sin[:rows],
            self.residual[:rows],
            self.qkv[:rows],
            self.q[:rows],
            self.attended[:rows],
        )


class _Memory:
    """The rows that all passes share, and the pass whose rows they are."""

    def __init__(self, model: Model, rows: int) -> None:
        config = model.config
        heads, head_dim = config.num_heads, config.head_dim
        fused = heads + 2 * config.num_kv_heads

        def zeros(width: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(rows, width, dtype=dtype, device=model.device)

        qkv = zeros(fused * head_dim, model.dtype)
        self.rows = _Rows(
            slots=torch.full((rows,), NOWHERE, dtype=torch.int64, device=model.device),
            cos=zeros(head_dim // 2, torch.float32),
            sin=zeros(head_dim // 2, torch.float32),
            residual=zeros(config.hidden_size, model.dtype),
            qkv=qkv,
            q=qkv.view(rows, fused, head_dim)[:, :heads],
            attended=zeros(heads * head_dim, model.dtype),
        )
        self.owner: GraphPass | None = None


def _pieces(operators: Sequence[Operator]) -> Sequence[_Piece]:
    """Cuts a whole model at its attentions. ``embed`` and what follows the last are left out."""
    pieces, since = [], 1
    for index, operator in enumerate(operators):
        if operator.halves is None:
            continue
        part, since = operators[since:index], index + 1
        # By the end of a layer, where tasks that stop between layers alone may stop too.
        named = part[-2] if len(part) > 1 else part[0]
        together = tuple(one.name for one in part)
        pieces.append(_Piece(part, operator, Boundary(named.layer, named.name, together=together)))
    return pieces


def _compute(piece: _Piece, rows: _Rows) -> None:
    """Computes a piece over the shared memory: the work of a graph."""
    state = Activations(
        num_tokens=len(rows.slots),
        token_ids=rows.slots,  # which is not read, as `lse`
        slots=rows.slots,
        cos=rows.cos,
        sin=rows.sin,
        lse=rows.cos,
        plans={},
    )
    if piece.attn.layer:
        state.attended, state.residual = rows.attended, rows.residual
    else:
        state.x = rows.residual
    for operator in piece.operators:
        if operator.name == "qkv_proj":
            state.into = rows.qkv
        operator.run(state)
    required(piece.attn.halves)[0](state)
    if state.residual is not rows.residual:
        rows.residual.copy_(required(state.residual))
