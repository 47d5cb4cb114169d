"""A group of runners in one process that computes a prompt round a ring, in threads."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from millrace.core.kv.layout import KvLayout
from millrace.core.kv.sp_layout import (
    PAD,
    RING_BUFFERS,
    ChunkShares,
    Layout,
    Move,
    buffer_of,
    layout,
)
from millrace.core.request import Chunk
from millrace.engine.attention.ring import RingTask, ring_task
from millrace.engine.forward.passes import Boundary
from millrace.engine.forward.prefill_task import PrefillTask
from millrace.engine.runner import Runner

WAIT_S = 60.0


def plan(
    rng: random.Random, tokens: int, sizes: Sequence[int], ends: Sequence[int] = ()
) -> list[Chunk]:
    """Makes chunks of any lengths, or to `ends`, each on the first members by `sizes`."""
    ends = ends or [*sorted(rng.sample(range(1, tokens), len(sizes) - 1)), tokens]
    starts = [0, *ends[:-1]]
    return [
        Chunk(
            index=i,
            start_token=start,
            num_tokens=end - start,
            instance_ids=tuple(f"member-{m}" for m in range(size)),
        )
        for i, (start, end, size) in enumerate(zip(starts, ends, sizes, strict=True))
    ]


@dataclass(eq=False)
class Member:
    """One instance, with its pages of the request. ``memory``: of every rank's pool."""

    runner: Runner
    pages: list[int] = field(default_factory=list)
    buffers: list[list[int]] = field(default_factory=list)

    @property
    def memory(self) -> Tensor:
        """[pools, layers, pages, ...]"""
        return self.runner.storage

    def take(self, rng: random.Random, pages: int, buffer_pages: int) -> None:
        """Returns pages in random order, not next to each other."""
        pool = self.runner.pool
        count = pages + RING_BUFFERS * buffer_pages
        taken = pool.allocate(min(pool.free_pages, count + 7))
        rng.shuffle(taken)
        pool.free(taken[count:])
        self.pages = taken[:pages]
        rest = taken[pages:count]
        self.buffers = [rest[i::RING_BUFFERS] for i in range(RING_BUFFERS)]

    def free(self) -> None:
        self.runner.pool.free(self.pages + [page for buffer in self.buffers for page in buffer])


class LocalRing:
    """Copies blocks from pool to pool as soon as both ends are ready."""

    def __init__(self, members: Sequence[Member], moves: Sequence[Move] = ()) -> None:
        self.members = members
        self.moves = moves
        self.tasks: list[list[RingTask]] = []  # [pass][rank]
        self.aborted = False
        self.copied_pages = 0
        self.changed = threading.Condition()
        size = len(members)
        self.published = [0] * size  # turns, which are the exchanged layers of the passes
        self.sent = [(0, 1)] * size  # the next (turn, step) that each sends
        self.arrived: set[tuple[int, int, int]] = set()  # rank, turn, step
        self.users = [[0] * RING_BUFFERS for _ in members]  # readers of each buffer left

    def abort(self) -> None:
        with self.changed:
            self.aborted = True
            self.changed.notify_all()

    def turns(self) -> list[tuple[int, int]]:
        """Returns (pass, layer) of all blocks that go round."""
        layers = self.members[0].memory.shape[1]
        return [
            (number, layer)
            for number, tasks in enumerate(self.tasks)
            for layer in range(layers if tasks[0].last_layer else layers - 1)
        ]

    def pump(self) -> None:
        """Sends all blocks that can be sent. Each member sends in the order of turns and steps."""
        while any(self._send(rank) for rank in range(len(self.members))):
            self.changed.notify_all()

    def _send(self, rank: int) -> bool:
        turn, step = self.sent[rank]
        size, target = len(self.members), (rank + 1) % len(self.members)
        is_here = (
            (rank, turn, step - 1) in self.arrived if step > 1 else self.published[rank] > turn
        )
        if size == 1 or not is_here or self.aborted or self.users[target][buffer_of(step)]:
            return False
        number, layer = self.turns()[turn]
        source = self.tasks[number][rank].blocks[step - 1].pages.long()
        place = self.tasks[number][target].blocks[step].pages.long()
        ours, theirs = self.members[rank].memory, self.members[target].memory
        own = layer * ours.shape[2] if step == 1 else 0
        theirs.flatten(1, 2)[:, place] = ours.flatten(1, 2)[:, source + own]
        self.copied_pages += len(place)
        self.arrived.add((target, turn, step))
        self.users[target][buffer_of(step)] = 2 if step < size - 1 else 1
        if step > 1:
            self.users[rank][buffer_of(step - 1)] -= 1
        self.sent[rank] = (turn, step + 1) if step < size - 1 else (turn + 1, 1)
        return True


class LocalLink:
    """A `RingLink`."""

    def __init__(self, ring: LocalRing, rank: int) -> None:
        self.rank = rank
        self.size = len(ring.members)
        self._ring = ring
        self._had: set[int] = set()  # layers of history

    def history(self, layer: int) -> bool:
        ring = self._ring
        if layer not in self._had:
            self._had.add(layer)
            for move in ring.moves:
                giver, receiver = (ring.members[_number(i)] for i in (move.giver, move.receiver))
                if receiver is ring.members[self.rank]:
                    source = [giver.pages[page] for page in move.source]
                    target = [receiver.pages[page] for page in move.target]
                    receiver.memory[:, layer, target] = giver.memory[:, layer, source]
        return not ring.aborted

    def publish(self, layer: int) -> None:
        ring = self._ring
        with ring.changed:
            assert ring.turns()[ring.published[self.rank]][1] == layer
            ring.published[self.rank] += 1
            ring.pump()

    def wait(self, step: int) -> bool:
        ring = self._ring
        wanted = (self.rank, ring.published[self.rank] - 1, step)
        with ring.changed:
            came = ring.changed.wait_for(lambda: ring.aborted or wanted in ring.arrived, WAIT_S)
        assert came, f"rank {self.rank} waits for ever for step {step}"
        return not ring.aborted

    def release(self, step: int) -> None:
        ring = self._ring
        with ring.changed:
            ring.users[self.rank][buffer_of(step)] -= 1
            ring.pump()


def _number(instance_id: str) -> int:
    return int(instance_id.removeprefix("member-"))


class RingGroup:
    """Computes a prompt chunk by chunk. ``between(member, boundary)`` is called at boundaries of
    every member, on its thread.
    """

    def __init__(
        self,
        runners: Sequence[Runner],
        chunks: Sequence[Chunk],
        prompt: Sequence[int],
        *,
        max_chunk_tokens: int,
        rng: random.Random,
        between: Callable[[Member, Boundary], None] = lambda member, boundary: None,
    ) -> None:
        pool = runners[0].pool.layout
        self.members = [Member(runner) for runner in runners]
        self.layout: Layout = layout(chunks, pool.page_tokens, max_chunk_tokens)
        for instance_id in self.layout.members:
            buffer_pages = self.layout.buffer_pages(pool.num_layers)
            self.members[_number(instance_id)].take(
                rng, self.layout.pages[instance_id], buffer_pages
            )
        self.prompt_ids = torch.tensor(prompt)
        self.pool: KvLayout = pool
        self.between = between
        self.want_hidden = False
        self.hidden: dict[int, Tensor] = {}  # by position
        self.logits: Tensor | None = None
        self.rings: list[LocalRing] = []

    def run(self) -> Tensor:
        """Returns logits float32 [vocab] after the prompt."""
        for shares in self.layout.chunks:
            if len(shares.group) == 1:
                self._run_alone(self.members[0], shares)
            else:
                self._run_ring(shares)
        assert self.logits is not None
        return self.logits

    def free(self) -> None:
        for member in self.members:
            member.free()

    def _is_last(self, shares: ChunkShares, number: int) -> bool:
        return shares.passes[number].number == self.layout.total_passes() - 1

    def _run_alone(self, member: Member, shares: ChunkShares) -> None:
        for number, now in enumerate(shares.passes):
            task = PrefillTask(
                token_ids=self.prompt_ids[now.start_token : now.start_token + now.num_tokens],
                history_tokens=now.start_token,
                pages=member.pages,
                want_logits=self._is_last(shares, number),
                want_hidden=self.want_hidden,
            )
            for boundary in member.runner.prefill_batch([task]):
                self.between(member, boundary)
            self._take(task, torch.arange(now.start_token, now.start_token + now.num_tokens))

    def ring(self, shares: ChunkShares) -> tuple[LocalRing, list[list[RingTask]]]:
        """Returns a chunk's ring, and the tasks [pass][rank] to run on it."""
        members = [self.members[_number(i)] for i in shares.group]
        ring = LocalRing(members, shares.moves)
        links = [LocalLink(ring, rank) for rank in range(len(members))]
        for number in range(len(shares.passes)):
            is_last = self._is_last(shares, number)
            tasks = [
                ring_task(
                    shares,
                    number,
                    link,
                    prompt_ids=self.prompt_ids,
                    pages=member.pages,
                    buffers=member.buffers,
                    layout=self.pool,
                    last_layer=is_last or self.want_hidden,
                )
                for member, link in zip(members, links, strict=True)
            ]
            tasks[0].want_logits = is_last
            for task in tasks:
                task.want_hidden = self.want_hidden
            ring.tasks.append(tasks)
        return ring, ring.tasks

    def _run_ring(self, shares: ChunkShares) -> None:
        ring, _ = self.ring(shares)
        self.rings.append(ring)
        members = ring.members
        with ThreadPoolExecutor(len(members)) as threads:
            for ended in [threads.submit(self._run_member, ring, r) for r in range(len(members))]:
                ended.result()

    @torch.inference_mode()
    def _run_member(self, ring: LocalRing, rank: int) -> None:
        member = ring.members[rank]
        try:
            for tasks in ring.tasks:
                for boundary in member.runner.prefill_ring(tasks[rank]):
                    self.between(member, boundary)
                self._take(tasks[rank], tasks[rank].positions)
        except BaseException:
            ring.abort()
            raise

    def _take(self, task: PrefillTask | RingTask, positions: Tensor) -> None:
        if task.logits is not None:
            self.logits = task.logits
        if task.hidden is not None:
            self.hidden.update(zip(positions.tolist(), task.hidden, strict=True))

    def kv(self) -> Tensor:
        """Returns [pools, layers, 2, heads, tokens, head_dim] of the whole prompt, from the
        keepers.
        """
        last = self.layout.chunks[-1]
        memory = self.members[0].memory
        pools, layers, _, _, heads, _, head_dim = memory.shape
        kv = torch.full((pools, layers, 2, heads, len(self.prompt_ids), head_dim), float("nan"))
        for instance_id, share in zip(last.group, last.shares, strict=True):
            member = self.members[_number(instance_id)]
            pages = [member.pages[page] for page in share.pages]
            found = member.memory[:, :, pages].permute(0, 1, 3, 4, 2, 5, 6).flatten(4, 5).float()
            for slot, position in enumerate(share.positions):
                if position != PAD:
                    kv[..., position, :] = found[..., slot, :]
        return kv
