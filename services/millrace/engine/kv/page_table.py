"""Page tables of running sequences: they stay where attention reads them, and only changes travel.

Mnemosyne section 5 and Medha section 5 keep sequence state at the workers and send them deltas,
since a long context has too many pages to be copied in every iteration: a million tokens take
65,536 entries. Here the host's table is the original. The device's copy is updated entry by entry,
and so is the copy of every other rank of a tensor-parallel group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millrace.engine.device.copies import upload
from millrace.engine.kv.step_tables import Pages

_FIRST_WIDTH: Final = 16
"""Pages that a row holds before the table is first widened."""

Entries = npt.NDArray[np.int32]


class PageTable:
    """int32 [rows, width]: each row has the pages of one sequence in token order, then undefined
    entries.
    """

    def __init__(
        self, rows: int, device: torch.device | str = "cpu", *, shared: bool | None = None
    ) -> None:
        """`device`: the device where attention reads the table.

        `shared`: attention reads the host's table itself; by default on a CPU, and only there.
        """
        self._device = torch.device(device)
        self._is_host = self._device.type == "cpu" if shared is None else shared
        self._host: Entries = np.zeros((rows, _FIRST_WIDTH), dtype=np.int32)
        self._copy: Tensor | None = None  # on another device
        self._changed: list[npt.NDArray[np.int64]] = []  # flat indices that the copy lacks

    def fix(self, width: int) -> Tensor:
        """Makes room for rows of `width` pages, and returns the device's copy, int32 [rows, at
        least width]. The copy keeps its address while no row gets more pages."""
        if width > self.width:
            self._widen(width)
        copy = self.copy_of(self.first(len(self._host)))
        if copy is None:
            raise ValueError("the page table has no copy: attention reads the host's")
        return copy

    @property
    def width(self) -> int:
        width: int = self._host.shape[1]
        return width

    def put(self, row: int, pages: Pages) -> int:
        """Makes a row begin with these pages. Returns how many entries changed."""
        wanted = np.asarray(pages, dtype=np.int32)
        if len(wanted) > self.width:
            self._widen(len(wanted))
        held = self._host[row, : len(wanted)]
        changed = np.flatnonzero(held != wanted)
        if len(changed):
            held[:] = wanted
            if self._copy is not None:
                self._changed.append(row * self.width + changed)
        return len(changed)

    def move(self, source: int, target: int, count: int) -> None:
        """Moves the first `count` pages of one row into another."""
        self.put(target, self._host[source, :count])

    def row(self, row: int, count: int) -> list[int]:
        """Returns the first `count` pages of a row."""
        pages: list[int] = self._host[row, :count].tolist()
        return pages

    def first(self, rows: int) -> Tensor:
        """Returns [rows, width] on the host: the first rows themselves, not a copy."""
        return torch.from_numpy(self._host[:rows])

    def copy_of(self, view: Tensor) -> Tensor | None:
        """Returns the device's copy of a table that `first` returned, updated in one transfer.

        None for any other table, and where attention reads the host's table."""
        is_mine = view.data_ptr() == self._host.ctypes.data and view.shape[1] == self.width
        if self._is_host or not is_mine:
            return None
        if self._copy is None:
            self._copy = torch.from_numpy(self._host).to(self._device, copy=True)
        elif self._changed:
            index = np.unique(np.concatenate(self._changed))
            entries = torch.from_numpy(self._host.reshape(-1)[index]).long()
            where, pages = upload(self._device, torch.from_numpy(index), entries)
            self._copy.view(-1)[where] = pages.int()
        self._changed.clear()
        return self._copy[: len(view)]

    def _widen(self, pages: int) -> None:
        narrow = self._host
        width = max(pages, 2 * narrow.shape[1])
        self._host = np.zeros((len(narrow), width), dtype=np.int32)
        self._host[:, : narrow.shape[1]] = narrow
        self._copy = None
        self._changed.clear()


@dataclass(frozen=True, slots=True)
class TableDelta:
    """The changed entries of a page table by their flat index."""

    shape: tuple[int, int]
    index: npt.NDArray[np.int64]
    pages: Entries


class TableMirror:
    """A page table on both sides of a wire. Rows and columns that a table loses are forgotten."""

    def __init__(self) -> None:
        self._table: Entries = np.zeros((0, 0), dtype=np.int32)

    def delta(self, table: Entries) -> TableDelta:
        """Returns the entries of `table` [rows, width] that the other side's mirror lacks."""
        known = self._shaped((table.shape[0], table.shape[1]))
        index = np.flatnonzero(known != table)
        self._table = table.copy() if len(index) else known
        return TableDelta((table.shape[0], table.shape[1]), index, table.reshape(-1)[index])

    def apply(self, delta: TableDelta) -> Tensor:
        """Returns the table that `delta` was made of."""
        self._table = self._shaped(delta.shape)
        self._table.reshape(-1)[delta.index] = delta.pages
        return torch.from_numpy(self._table)

    def _shaped(self, shape: tuple[int, int]) -> Entries:
        held = self._table
        if held.shape == shape:
            return held
        rows, width = (min(*pair) for pair in zip(held.shape, shape, strict=True))
        table = np.zeros(shape, dtype=np.int32)
        table[:rows, :width] = held[:rows, :width]
        return table
