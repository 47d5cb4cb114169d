"""Page tables: entries stay, and only changes travel."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from millrace.engine.kv.page_table import PageTable, TableMirror
from support.tiny_engine import Request, make_runner, prefill
from support.tiny_models import model_folder, prompt

aten = torch.ops.aten


def test_rows_hold_their_pages_and_widen() -> None:
    table = PageTable(3)
    assert table.put(0, [5, 6, 7]) == 3
    assert table.put(0, [5, 9, 7]) == 1
    assert table.put(1, list(range(100, 140))) == 40
    table.move(1, 2, 40)
    assert table.row(0, 3) == [5, 9, 7] and table.row(2, 40) == list(range(100, 140))
    assert table.first(2).shape == (2, table.width) and table.width >= 40


def test_what_is_the_same_already_is_not_written() -> None:
    table = PageTable(2)
    pages = np.arange(12, dtype=np.int32)
    assert table.put(1, pages) == 11  # page 0 is there
    assert table.put(1, pages) == 0


def test_the_table_stays_where_it_is_until_it_widens() -> None:
    table = PageTable(2)
    place = table.first(2).data_ptr()
    table.put(0, [1, 2])
    assert table.first(2).data_ptr() == place
    assert table.copy_of(table.first(2)) is None  # attention reads the host's


def test_another_devices_copy_follows_by_deltas() -> None:
    chance = random.Random(1)
    table = PageTable(4, shared=False)  # as if attention read on another device
    for _ in range(60):
        row = chance.randrange(4)
        table.put(row, [chance.randrange(90) for _ in range(chance.randint(0, 30))])
        if chance.random() < 0.3:
            table.move(row, chance.randrange(4), 3)
        if chance.random() < 0.5:
            copy = table.copy_of(table.first(3))
            assert copy is not None and torch.equal(copy, table.first(3))
            assert copy.data_ptr() != table.first(3).data_ptr()
    assert table.copy_of(torch.zeros(3, table.width, dtype=torch.int32)) is None


class Copies(TorchDispatchMode):
    """Counts the entries of all tensors that are copied."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (aten._to_copy, aten.clone):
            self.entries += args[0].numel()
        elif func.overloadpacket in (aten.copy_, aten.index_put_):
            self.entries += args[-1].numel()
        return func(*args, **(kwargs or {}))


def test_a_copy_takes_what_has_changed_and_no_more() -> None:
    table = PageTable(8, shared=False)  # as if attention read on another device
    table.put(7, list(range(1000)))
    with Copies() as whole:
        table.copy_of(table.first(8))
    assert whole.entries == 8 * table.width
    for changed in (1, 5):
        table.put(3, list(range(50, 50 + changed)))
        with Copies() as copies:
            found = table.copy_of(table.first(8))
        assert 0 < copies.entries <= 4 * changed
        assert torch.equal(found, table.first(8))
    with Copies() as copies:
        table.copy_of(table.first(8))
    assert copies.entries == 0


def test_passes_over_a_batchs_table_read_its_copy() -> None:
    runner = make_runner(model_folder("llama"))
    request = Request(runner, prompt(20), room=4)
    request.tokens.append(int(prefill(runner, request).argmax()))
    table = PageTable(2, shared=False)
    runner.follow(table)
    table.put(0, request.pages)
    view = table.first(1)
    kv_lens = torch.tensor([21], dtype=torch.int32)
    arguments = (torch.tensor([request.tokens[-1]]), torch.tensor([20]))
    state = runner.states.decode(*arguments, view, kv_lens, None)
    (plan,) = state.plans.values()
    assert plan.device_table is not None and torch.equal(plan.device_table, view)
    state = runner.states.decode(*arguments, view.clone(), kv_lens, None)
    assert next(iter(state.plans.values())).device_table is None


def test_the_other_side_of_a_wire_has_the_same_table() -> None:
    chance = np.random.default_rng(2)
    here, there = TableMirror(), TableMirror()
    for _ in range(80):
        shape = chance.integers(1, 6), chance.integers(1, 9)
        table = chance.integers(0, 3, shape).astype(np.int32)
        assert np.array_equal(there.apply(here.delta(table)).numpy(), table)


def test_what_is_known_does_not_go_over_the_wire_again() -> None:
    mirror = TableMirror()
    table = np.arange(24, dtype=np.int32).reshape(3, 8)
    mirror.delta(table)
    assert len(mirror.delta(table).index) == 0
    more = np.concatenate((table, table[:1]))
    more[1, 2] = 99
    delta = mirror.delta(more)
    assert delta.index.tolist() == [10, *range(25, 32)]
