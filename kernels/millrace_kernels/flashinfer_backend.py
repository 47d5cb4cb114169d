"""Attention by FlashInfer's paged kernels, on NVIDIA GPUs that have the package.

FlashInfer knows two masks: none, and causal with the last row at the last K/V slot. Explicit
positions are cut into pieces with these masks: where a sequence's K/V slots stand in ascending
order of position, a row sees a prefix of them, and a run of rows that all see the same prefix, or
each one slot more than the row before it, is one such call. A step of a zigzag ring is one piece.

Shape letters: n tokens, h q heads, k kv heads, d head_dim, P pieces.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import math
import weakref
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import Final, Literal, Protocol

import torch
from torch import Tensor

from millrace_kernels.plan import AttentionPlan

DTYPES: Final = (torch.bfloat16, torch.float16)
HEAD_DIMS: Final = (64, 128, 256)
MOST_PIECES: Final = 8192
"""The size of FlashInfer's fixed table for a call's lengths."""

_LEAST_CAPABILITY = (8, 0)
_WORKSPACE_BYTES = 128 * 2**20
"""Bytes for partial results of K/V that is split over thread blocks; FlashInfer's advice."""

_HOPPER: Final = 9  # the major number of its compute capability
_TILE_ROWS: Final = 128
_LEAST_SHARE: Final = 0.75
"""Of Hopper's multiprocessors, how many a plan must have tiles for."""

_CUDA_CORE_GROUP = 2
"""Query heads per kv head up to which decode is as fast or faster without tensor cores."""

_LN_2 = math.log(2.0)

Kind = Literal["prefill", "decode", "grouped decode"]


class Wrapper(Protocol):
    """The common methods of FlashInfer's prefill and decode wrappers."""

    def plan(self, *tables_and_shape: Tensor | int, **options: object) -> None:
        """Computes the schedule of one call."""

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor,
        *,
        q_scale: float,
        out: Tensor | None,
        return_lse: bool,
    ) -> tuple[Tensor, Tensor]:
        """Runs the planned call; returns (out_nhd, base-2 lse_nh)."""


class Event(Protocol):
    """`torch.cuda.Event`, of the present stream."""

    def record(self) -> None:
        """Puts the event behind what is enqueued."""

    def query(self) -> bool:
        """Returns whether it has passed."""


def new_event() -> Event:
    """Makes an event on the present device."""
    event: Event = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch: untyped
    return event


@cache
def unavailable(device: torch.device) -> str:
    """Returns why FlashInfer can't run on the device, or ""."""
    if device.type != "cuda":
        return f"FlashInfer needs a CUDA device, not {device}"
    if importlib.util.find_spec("flashinfer") is None:
        return "the package flashinfer-python is not installed"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        return f"FlashInfer needs compute capability 8.0, {device} has {capability}"
    try:
        flashinfer()
    except (ImportError, OSError, RuntimeError) as error:
        return f"flashinfer can't be imported: {error}"
    return ""


def is_not_prebuilt(error: Exception) -> bool:
    """Returns whether FlashInfer raised this for a module that is not prebuilt, where
    FLASHINFER_DISABLE_JIT forbids to compile it.
    """
    return type(error).__name__ == "MissingJITCacheError"


def describe() -> str:
    """Describes FlashInfer in one phrase, for logs."""
    if reason := unavailable(torch.device("cuda")):
        return f"no FlashInfer ({reason})"
    return f"FlashInfer {importlib.metadata.version('flashinfer-python')}"


def refusal(plan: AttentionPlan) -> str:
    """Returns why FlashInfer can't do this plan, or ""."""
    if plan.dtype not in DTYPES:
        return f"FlashInfer takes bfloat16 and float16, not {plan.dtype}"
    if plan.head_dim not in HEAD_DIMS:
        return f"FlashInfer takes head_dim {', '.join(map(str, HEAD_DIMS))}, not {plan.head_dim}"
    if plan.has_positions and plan.sliding_window is not None:
        return "FlashInfer takes no sliding window where positions are given"
    for index in range(len(plan.sequences)):
        if plan.kv_positions is not None and bool((plan.positions(index)[1].diff() < 0).any()):
            return f"the K/V slots of sequence {index} are not in order of position"
    count = len(pieces_of(plan)) if plan.has_positions else len(plan.sequences)
    if count > MOST_PIECES:
        return f"the plan makes {count} calls of at most {MOST_PIECES}"
    return ""


def fills(plan: AttentionPlan) -> bool:
    """Returns whether a plan has rows enough for FlashInfer to use most of the device.

    FlashInfer's kernel for Hopper computes a tile of rows over all K/V in one thread block: on one
    H100, 32 rows over a million K/V slots took 8.5 times as long as by Triton, which divides the
    K/V among thread blocks. FlashInfer's other kernels do so too.
    """
    lengths = [stop - start for start, stop, _ in plan.sequences]
    if max(lengths, default=0) <= 1 or capability_of(plan.device)[0] != _HOPPER:
        return True
    group = plan.num_q_heads // plan.num_kv_heads
    tiles = sum(-(-length * group // _TILE_ROWS) for length in lengths)
    return tiles * plan.num_kv_heads >= _LEAST_SHARE * multiprocessors_of(plan.device)


@cache
def capability_of(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@cache
def multiprocessors_of(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def plan(checked: AttentionPlan) -> FlashInferPlan:
    """Makes FlashInfer's side of a plan. Raises ValueError where it isn't supported."""
    if reason := refusal(checked):
        raise ValueError(reason)
    return FlashInferPlan(checked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows `start` to `stop` - 1, over the first `kv_len` K/V slots of their sequence.

    Causal: the last row sees all slots, each earlier row one slot less; otherwise all rows see all.
    A single row is not causal.
    """

    sequence: int
    start: int
    stop: int
    kv_len: int
    causal: bool

    @property
    def q_len(self) -> int:
        """The number of rows of q."""
        return self.stop - self.start


def pieces_of(plan: AttentionPlan) -> list[Piece]:
    """Returns the plan as pieces, in order of their rows, without rows that see nothing.

    The K/V slots of each sequence must be in order of position.
    """
    pieces: list[Piece] = []
    for index, (start, stop, kv_len) in enumerate(plan.sequences):
        if start == stop or kv_len == 0:
            continue
        if not plan.causal or (not plan.has_positions and stop - start <= kv_len):
            pieces.append(
                Piece(
                    sequence=index,
                    start=start,
                    stop=stop,
                    kv_len=kv_len,
                    causal=plan.causal and stop - start > 1,
                )
            )
            continue
        rows, slots = plan.positions(index)
        seen = torch.searchsorted(slots, rows, right=True)
        for first, last, causal in _runs(seen):
            if not seen[last]:
                continue
            begin = first if seen[first] else first + 1  # skips a row that sees nothing
            pieces.append(
                Piece(
                    sequence=index,
                    start=start + begin,
                    stop=start + last + 1,
                    kv_len=int(seen[last]),
                    causal=causal and begin < last,
                )
            )
    return pieces


def _runs(seen: Tensor) -> list[tuple[int, int, bool]]:
    """Returns runs of rows as (first, last, causal), from the number of K/V slots that each row
    sees.

    Within a run each row sees as many slots as the row before it, or each row one more.
    """
    steps = seen.diff()
    changes: list[int] = (steps.diff().nonzero().flatten() + 1).tolist()
    runs: list[tuple[int, int, bool]] = []
    first = 0
    for begin, last in pairwise([0, *changes, len(steps)]):
        step = int(steps[begin]) if last else 0
        if step in (0, 1):
            runs.append((first, last, step == 1))
            first = last + 1
        else:
            runs.extend((row, row, False) for row in range(first, last))
            first = last
    if first < len(seen):
        runs.append((first, first, False))
    return runs


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLists:
    """Pages in FlashInfer's form, int32 on the CPU.

    indptr [P + 1]: where each piece's pages begin in `indices`; last_page_len [P]: slots in use
    of its last page.
    """

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


def page_lists(pieces: Sequence[Piece], page_table: Tensor, page_tokens: int) -> PageLists:
    """Returns the pages of each piece's K/V, from page_table [B, max_pages]."""
    kv_lens = torch.tensor([piece.kv_len for piece in pieces], dtype=torch.int32)
    counts = (kv_lens + page_tokens - 1) // page_tokens
    rows = page_table.cpu()[[piece.sequence for piece in pieces]]
    used = torch.arange(rows.shape[1]) < counts[:, None]
    return PageLists(
        indptr=_indptr(counts),
        indices=rows[used].int(),
        last_page_len=kv_lens - (counts - 1) * page_tokens,
    )


def _indptr(counts: Tensor) -> Tensor:
    indptr = torch.zeros(len(counts) + 1, dtype=torch.int32)
    indptr[1:] = counts.cumsum(0)
    return indptr


@dataclass(frozen=True, slots=True)
class _Call:
    """One planned wrapper and its rows, int64 on the device; None: all rows in their order."""

    wrapper: Wrapper
    rows: Tensor | None


class FlashInferPlan:
    """A plan's FlashInfer calls: one for its causal pieces and one for its pieces without a mask.

    The calls of a device share one workspace, so plans must run on one stream.
    """

    def __init__(self, checked: AttentionPlan) -> None:
        pieces = pieces_of(checked)
        self._rows = checked.num_tokens
        self._covered = sum(piece.q_len for piece in pieces)
        store = store_of(checked.device)
        held: list[_Held] = []
        weakref.finalize(self, store.give_back, held)
        self._calls: list[_Call] = []
        for group in _groups(pieces):
            kind = _kind(checked, group)
            one = store.take(kind)
            held.append(one)
            _plan(one.wrapper, kind, checked, group)
            one.planned.record()
            self._calls.append(_Call(one.wrapper, self._rows_of(checked, group)))

    def _rows_of(self, checked: AttentionPlan, pieces: Sequence[Piece]) -> Tensor | None:
        if sum(piece.q_len for piece in pieces) == self._rows:
            return None
        rows = [torch.arange(piece.start, piece.stop) for piece in pieces]
        return torch.cat(rows).to(checked.device)

    def run(
        self, q_nhd: Tensor, kv_layer: Tensor, *, scale: float, out_nhd: Tensor, lse_nh: Tensor
    ) -> None:
        """Fills out_nhd, of q's dtype or float32, and the natural-log lse_nh.

        FlashInfer writes q's dtype: a float32 out holds its values.
        """
        if self._covered < self._rows:
            out_nhd.zero_()
            lse_nh.fill_(float("-inf"))
        for call in self._calls:
            q = q_nhd if call.rows is None else q_nhd.index_select(0, call.rows)
            direct = call.rows is None and out_nhd.dtype == q.dtype
            out, lse_base_2 = call.wrapper.run(
                q, kv_layer, q_scale=scale, out=out_nhd if direct else None, return_lse=True
            )
            if call.rows is None:
                torch.mul(lse_base_2, _LN_2, out=lse_nh)
                if not direct:
                    out_nhd.copy_(out)
            else:
                lse_nh.index_copy_(0, call.rows, lse_base_2 * _LN_2)
                out_nhd.index_copy_(0, call.rows, out.to(out_nhd.dtype))


def _groups(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Groups the pieces by mask; single rows join the causal pieces, if there are any."""
    if not any(piece.causal for piece in pieces):
        return [list(pieces)] if pieces else []
    causal = [piece for piece in pieces if piece.causal or piece.q_len == 1]
    rest = [piece for piece in pieces if not piece.causal and piece.q_len > 1]
    return [causal, rest] if rest else [causal]


def _kind(checked: AttentionPlan, pieces: Sequence[Piece]) -> Kind:
    if any(piece.q_len > 1 for piece in pieces):
        return "prefill"
    group = checked.num_q_heads // checked.num_kv_heads
    return "grouped decode" if group > _CUDA_CORE_GROUP else "decode"


def _plan(wrapper: Wrapper, kind: Kind, checked: AttentionPlan, pieces: Sequence[Piece]) -> None:
    lists = page_lists(pieces, checked.page_table, checked.page_tokens)
    tables = (lists.indptr, lists.indices, lists.last_page_len)
    shape = (checked.num_q_heads, checked.num_kv_heads, checked.head_dim, checked.page_tokens)
    window = checked.sliding_window
    options = {
        "window_left": -1 if window is None else window - 1,
        "logits_soft_cap": checked.soft_cap,
        "sm_scale": 1.0,  # run() brings the scale
        "q_data_type": checked.dtype,
        "kv_data_type": checked.dtype,
    }
    if kind == "prefill":
        causal = any(piece.causal for piece in pieces)
        q_lens = torch.tensor([piece.q_len for piece in pieces])
        wrapper.plan(_indptr(q_lens), *tables, *shape, causal=causal, **options)
    else:
        wrapper.plan(*tables, *shape, **options)


@dataclass(frozen=True, slots=True)
class _Held:
    """A wrapper. `planned` has passed once the device has copied its last plan from the host."""

    kind: Kind
    wrapper: Wrapper
    planned: Event


@dataclass(slots=True)
class _Store:
    """A device's workspace, and the wrappers that no live plan holds.

    A wrapper keeps its plan, so each call of a live plan needs a wrapper of its own; making a
    wrapper pins 8 MiB of host memory, so they are kept. A wrapper writes its plan to that memory,
    from where the device copies it when it comes to it: until then the wrapper has no other plan.
    """

    workspace: Tensor
    _idle: defaultdict[Kind, deque[_Held]] = field(default_factory=lambda: defaultdict(deque))

    def take(self, kind: Kind) -> _Held:
        """Returns a wrapper to plan."""
        idle = self._idle[kind]
        if idle and idle[0].planned.query():  # the one that was given back first
            return idle.popleft()
        with torch.inference_mode(False):  # plans in another mode could not write its buffers
            return _Held(kind, _new_wrapper(kind, self.workspace), new_event())

    def give_back(self, held: list[_Held]) -> None:
        """Takes back the wrappers of a deleted plan."""
        for one in held:
            self._idle[one.kind].append(one)


def _new_wrapper(kind: Kind, workspace: Tensor) -> Wrapper:
    package = flashinfer()
    wrapper: Wrapper
    if kind == "prefill":
        wrapper = package.BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout="HND")
    else:
        wrapper = package.BatchDecodeWithPagedKVCacheWrapper(
            workspace, kv_layout="HND", use_tensor_cores=kind == "grouped decode", backend="fa2"
        )
    return wrapper


@cache
def store_of(device: torch.device) -> _Store:
    """Returns the device's idle wrappers, which all plans share, and their workspace."""
    with torch.inference_mode(False):  # the next caller may be in another mode
        return _Store(torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device))


@cache
def flashinfer() -> ModuleType:
    """Imports the package. Raises what its import raises."""
    return importlib.import_module("flashinfer")
