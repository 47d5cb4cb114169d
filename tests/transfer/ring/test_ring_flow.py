"""The ring's order, window and forwarding alone, with deliveries in any order."""

from __future__ import annotations

import random

import pytest

from millrace.core.kv.sp_layout import buffer_of
from millrace.transfer.ring.flow import RingFlow, RingOrder


class Member:
    """A RingFlow, two buffers that hold (origin, layer), and stepwise compute."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.flow = RingFlow(size)
        self.buffers = [None, None]
        self.reading = set()  # buffers that a write of ours reads
        self.layer, self.step = 0, 0

    def compute(self, layers: int) -> bool:
        """Does one step of compute, if possible. Step 0 publishes."""
        if self.layer == layers:
            return False
        if self.step == 0:
            self.flow.publish()
        else:
            number = self.flow.order.number(self.layer, self.step)
            if not self.flow.has_arrived(number):
                return False
            origin = (self.rank - self.step) % self.size
            assert self.buffers[buffer_of(self.step)] == (origin, self.layer)
            self.flow.released(number)
        self.step = (self.step + 1) % self.size
        self.layer += self.step == 0
        return True


class Ring:
    """Members and the messages between them, which are delivered in any order."""

    def __init__(self, size: int, layers: int, seed: int) -> None:
        self.members = [Member(rank, size) for rank in range(size)]
        self.layers = layers
        self.rng = random.Random(seed)
        self.under_way = []

    def run(self) -> None:
        idle = 0
        while idle < 200:
            member = self.rng.choice(self.members)
            event = self.rng.choice((self.open, self.compute, self.send, self.credit, self.deliver))
            idle = 0 if event(member) else idle + 1
        assert all(m.layer == self.layers and m.flow.is_idle for m in self.members)
        assert all(m.flow.has_all_received for m in self.members)

    def open(self, member) -> bool:
        member.flow.open_buffers()
        return False

    def compute(self, member) -> bool:
        return member.compute(self.layers)

    def send(self, member) -> bool:
        number = member.flow.next_send()
        if number is None:
            return False
        layer, step = divmod(number, len(self.members) - 1)
        block = (member.rank, layer)
        if step:
            block = member.buffers[buffer_of(step)]
            member.reading.add(buffer_of(step))
        self.under_way.append(("block", member, number, block))
        return True

    def credit(self, member) -> bool:
        count = member.flow.next_credit()
        if count is None:
            return False
        self.under_way.append(("credit", member, count, None))
        return True

    def deliver(self, _) -> bool:
        if not self.under_way:
            return False
        kind, member, number, block = self.under_way.pop(self.rng.randrange(len(self.under_way)))
        others = len(self.members)
        if kind == "credit":
            self.members[member.rank - 1].flow.credit(number)
            return True
        target = self.members[(member.rank + 1) % others]
        step = target.flow.order.step(number)
        assert buffer_of(step) not in target.reading
        target.buffers[buffer_of(step)] = block
        target.flow.arrived(number)
        if step > 1:
            member.reading.discard(buffer_of(step - 1))
        member.flow.written(number)
        return True


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("seed", range(8))
def test_every_block_is_attended_to_before_its_buffer_is_filled_anew(size, seed):
    Ring(size, layers=5, seed=seed).run()


def test_two_blocks_may_be_under_way():
    flow = RingFlow(4)
    flow.publish()
    assert flow.next_send() is None  # the next member's buffers are closed
    flow.credit(0)
    assert flow.next_send() == 0
    assert flow.next_send() is None  # the block to forward has not come
    flow.open_buffers()
    assert flow.next_credit() == 0 and flow.next_credit() is None
    flow.arrived(0)
    flow.arrived(1)
    assert flow.next_send() == 1
    assert flow.next_send() is None  # both buffers are full
    flow.credit(1)
    assert flow.next_send() == 2
    assert flow.has_all_sent


def test_a_buffer_is_free_once_it_was_released_and_forwarded():
    flow = RingFlow(3)
    flow.open_buffers()
    flow.publish()
    flow.credit(0)
    assert (flow.next_credit(), flow.next_send()) == (0, 0)
    flow.arrived(0)
    flow.released(0)
    assert flow.next_credit() is None
    assert flow.next_send() == 1
    flow.written(1)
    assert flow.next_credit() == 1
    flow.arrived(1)
    flow.released(1)  # the last step's, which no later member waits for
    assert flow.next_credit() == 2
    assert flow.is_idle


def test_what_nobody_may_have_sent_is_refused():
    flow = RingFlow(3)
    with pytest.raises(ValueError, match="block 0 came unexpectedly"):
        flow.arrived(0)
    flow.open_buffers()
    flow.next_credit()
    flow.arrived(0)
    with pytest.raises(ValueError, match="block 0 came unexpectedly"):
        flow.arrived(0)
    with pytest.raises(ValueError, match="block 2 came unexpectedly"):
        flow.arrived(2)
    with pytest.raises(ValueError, match="a credit of 3 blocks, of which 0 were sent"):
        flow.credit(3)
    with pytest.raises(ValueError, match="at least 2 members"):
        RingOrder(1)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7])
def test_a_block_waits_for_the_last_one_in_its_buffer(size):
    order = RingOrder(size)
    blocks = [(layer, step) for layer in range(4) for step in range(1, size)]
    for number, (layer, step) in enumerate(blocks):
        assert order.number(layer, step) == number and order.step(number) == step
        before = [n for n in range(number) if buffer_of(blocks[n][1]) == buffer_of(step)]
        assert order.freed_before(number) == (before[-1] + 1 if before else 0)
