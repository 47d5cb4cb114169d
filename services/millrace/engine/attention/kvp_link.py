"""The `RemoteLink` of an instance: packs rows into its exchange's memory, and reads answers there.

Shape letters: n rows of the pass, r rows and m new rows of a piece, h q heads, k kv heads, d
head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from millrace.core.kv.kvp_pass import (
    ExchangeShape,
    RemoteRows,
    Reply,
    Request,
    pack_table,
    pieces_of,
)
from millrace.engine.attention.kvp_memory import NewRows, PieceViews
from millrace.engine.attention.kvp_owner import Partial


class Exchange(Protocol):
    """The calls of `transfer.kvp.exchange.KvpExchange` that the compute thread makes."""

    @property
    def shape(self) -> ExchangeShape: ...
    def begin(self) -> None: ...
    def at(self, worker: str) -> tuple[int, int] | None: ...
    def post(self, worker: str, request: Request) -> None: ...
    def wait(self) -> Reply | None: ...


@dataclass(slots=True, eq=False)
class _Piece:
    entries: list[RemoteRows]
    rows: Tensor | slice  # of the pass
    new: NewRows | None
    views: PieceViews
    at: int  # offset of its request
    table: bytes  # empty once it was sent


class ExchangeLink:
    """A `RemoteLink`. `memory`: uint8, the exchange's."""

    def __init__(
        self, exchange: Exchange, memory: Tensor, dtype: torch.dtype, page_tokens: int
    ) -> None:
        self._exchange = exchange
        self._memory = memory
        self._bytes = memory.numpy()
        self._dtype = dtype
        self._page_tokens = page_tokens
        self._pieces: dict[str, list[_Piece]] = {}  # by KVP worker
        self._lost: dict[RemoteRows, str] = {}

    def begin(self, rows: Sequence[RemoteRows], slots: Tensor) -> None:
        """`RemoteLink.begin`."""
        self._exchange.begin()
        self._lost = {}
        by_worker: dict[str, list[RemoteRows]] = {}
        for entry in rows:
            by_worker.setdefault(entry.worker, []).append(entry)
        self._pieces = {}
        for worker, entries in by_worker.items():
            at = self._exchange.at(worker)
            if at is None:
                self._lost |= dict.fromkeys(entries, f"{worker} is not attached")
                continue
            pieces = pieces_of(entries, self._exchange.shape.max_rows)
            self._pieces[worker] = [self._piece(piece, at, slots) for piece in pieces]

    def send(self, layer: int, q_nhd: Tensor, kv_layers: Tensor) -> None:
        """`RemoteLink.send`."""
        self._now = layer, q_nhd, kv_layers
        for worker in self._pieces:
            self._post(worker, 0)

    def partials(self, layer: int) -> Iterator[Partial]:
        """`RemoteLink.partials`."""
        numbers = dict.fromkeys(self._pieces, 0)
        while (reply := self._exchange.wait()) is not None:
            worker = reply.worker
            if reply.lost:
                for piece in self._pieces.pop(worker):
                    self._lost |= dict.fromkeys(piece.entries, reply.lost)
                continue
            piece = self._pieces[worker][numbers[worker]]
            for missing in reply.missing:
                self._lost[piece.entries[missing]] = f"{worker} has let the shard go"
            yield Partial(piece.rows, piece.views.out, piece.views.lse)
            numbers[worker] += 1
            if numbers[worker] < len(self._pieces[worker]):
                self._post(worker, numbers[worker])

    def end(self) -> Mapping[RemoteRows, str]:
        """`RemoteLink.end`."""
        return self._lost

    def _piece(self, entries: list[RemoteRows], at: tuple[int, int], slots: Tensor) -> _Piece:
        rows = [row for e in entries for row in range(e.first_row, e.first_row + e.num_rows)]
        new = [row for e in entries for row in range(e.first_row, e.first_row + e.new_rows)]
        at_slots = slots[new]
        views = PieceViews.of(
            self._memory, self._exchange.shape, self._dtype, at, len(rows), len(new)
        )
        is_run = rows == list(range(rows[0], rows[0] + len(rows)))
        return _Piece(
            entries,
            slice(rows[0], rows[-1] + 1) if is_run else torch.tensor(rows),
            NewRows(at_slots // self._page_tokens, at_slots % self._page_tokens) if new else None,
            views,
            at[0],
            pack_table(entries),
        )

    def _post(self, worker: str, number: int) -> None:
        layer, q_nhd, kv_layers = self._now
        piece = self._pieces[worker][number]
        views, entries = piece.views, 0
        views.q.copy_(q_nhd[piece.rows])
        if piece.new is not None:
            piece.new.read(kv_layers, views.kv)
        if piece.table:
            end = piece.at + len(piece.table)
            self._bytes[piece.at : end] = np.frombuffer(piece.table, dtype=np.uint8)
            piece.table, entries = b"", len(piece.entries)
        request = Request(number, layer, len(views.q), len(views.kv), entries)
        self._exchange.post(worker, request)
