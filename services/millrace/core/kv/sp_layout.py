"""Decides which member of a group computes and keeps which tokens of a prompt (Tetris section 4.1).

Pure arithmetic on a request's chunks: every member of a group computes it for itself, and all
members get the same result. A chunk is computed in passes. A pass's tokens are interleaved over the
group in a zigzag: 2N shards for N members, of which rank r has the r-th from the front and the r-th
from the back, so that all ranks have the same attention to compute; rank 0, the leader, has the
last token. Earlier tokens are history, kept in any order, spread evenly over the group page by
page. Before a chunk on a larger group the old members give their last pages to the new members
(cache balancing). An old member with less than its share, after chunks of fewer tokens than
members, gains nothing. The givers keep these pages until the request is over, since their KV may
not yet have been sent to decode.

Slots are where a member's tokens lie in its pages, `page_tokens` to a page. A chunk on a group of
several begins in a page of its own, so that whole pages can be given; the slots that this leaves
empty hold `PAD`, a position that no query sees.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from millrace.core.arithmetic import ceil_div
from millrace.core.request import Chunk

#: Stands in slots that hold no token: a position after every real position.
PAD = 2**31 - 1

#: A ring's buffers: one is filled while attention reads the other.
RING_BUFFERS = 2


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring tokens, which lie in neighbouring slots from `slot` on."""

    start_token: int
    num_tokens: int
    slot: int


@dataclass(frozen=True, slots=True)
class GroupPass:
    """The tokens that a group computes in one forward pass: `num_tokens` from `start_token` on.

    ``runs[r]`` are the tokens that rank r computes, in order (none, where there are fewer tokens
    than members); ``filled[r]`` says how many slots of its share it has used after the pass.
    """

    number: int  # among the request's passes
    start_token: int
    num_tokens: int
    runs: tuple[tuple[Run, ...], ...]
    filled: tuple[int, ...]


@dataclass(slots=True)
class Share:
    """The tokens of a prompt that a member keeps, in the order of its slots.

    ``pages``: the numbers of its pages among all that the request has at this member, in the order
    in which it took them; ``positions``: the token in each slot of these pages, or PAD.
    """

    pages: array[int] = field(default_factory=lambda: array("i"))
    positions: array[int] = field(default_factory=lambda: array("i"))


@dataclass(frozen=True, slots=True)
class Move:
    """Pages that one member gives another before a chunk: ``source[i]`` becomes ``target[i]``."""

    giver: str
    receiver: str
    source: array[int]
    target: array[int]


@dataclass(frozen=True, slots=True)
class ChunkShares:
    """A chunk as its group computes it. ``shares[r]``: rank r's at the end of the chunk."""

    chunk: Chunk
    passes: tuple[GroupPass, ...]
    shares: tuple[Share, ...]
    moves: tuple[Move, ...]

    @property
    def group(self) -> tuple[str, ...]:
        return self.chunk.instance_ids

    def block_pages(self) -> int:
        """Returns the pages of the largest share, which travels round the ring."""
        return max(len(share.pages) for share in self.shares)


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of all tokens of a request's prefill, at every member of its last group.

    ``pages[instance]``: how many pages the request takes there, with those given away and without
    the ring's buffers. ``fetched[instance]``: runs of history that decode sends there before the
    first chunk, if an earlier attempt left history.
    """

    chunks: tuple[ChunkShares, ...]
    pages: dict[str, int]
    fetched: dict[str, tuple[Run, ...]]
    page_tokens: int

    @property
    def members(self) -> tuple[str, ...]:
        return self.chunks[-1].group

    def total_passes(self) -> int:
        return self.chunks[-1].passes[-1].number + 1

    def first_chunk(self, instance_id: str) -> int:
        """Returns the index among `chunks` of the first chunk that the instance takes part in."""
        return next(i for i, chunk in enumerate(self.chunks) if instance_id in chunk.group)

    def computed(self, instance_id: str) -> list[Run]:
        """Returns the runs that the instance computes, ascending in its slots.

        The slots count all its pages in the order in which it took them, also pages given away
        since.
        """
        runs: list[Run] = []
        for shares in self.chunks[self.first_chunk(instance_id) :]:
            rank = shares.group.index(instance_id)
            pages = shares.shares[rank].pages
            for one in shares.passes:
                for run in one.runs[rank]:
                    index, row = divmod(run.slot, self.page_tokens)
                    slot = pages[index] * self.page_tokens + row
                    runs.append(Run(run.start_token, run.num_tokens, slot))
        return runs

    def buffer_pages(self, kv_layers: int) -> int:
        """Returns the pages that a member lends to each of the ring's buffers.

        A block is one layer of a share, and a page has room for `kv_layers` layers, so a buffer
        takes few. 0 where no chunk is on a group of several.
        """
        most = max((c.block_pages() for c in self.chunks if len(c.group) > 1), default=0)
        return ceil_div(most, kv_layers)


def zigzag(tokens: int, members: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Returns (first, count) of the front and the back shard of each rank, within `tokens`.

    Every rank has as many tokens, one more or less; rank 0 always has the last token.
    """
    even, more = divmod(tokens, members)
    shares = [even + (rank < more) for rank in range(members)]
    fronts, backs, start, end = [], [], 0, tokens
    for share in shares:
        front, back = share // 2, share - share // 2
        fronts.append((start, front))
        backs.append((end - back, back))
        start += front
        end -= back
    return list(zip(fronts, backs, strict=True))


def pass_tokens(tokens: int, members: int, max_chunk_tokens: int) -> list[int]:
    """The tokens of each pass of a chunk: nearly equal, and at most `max_chunk_tokens` per member.

    All but the last divide by the members, so that a member's share of the passes together is that
    of the chunk.
    """
    passes = ceil_div(tokens, members * max_chunk_tokens)
    step = ceil_div(tokens, passes * members) * members
    return [min(step, tokens - start) for start in range(0, tokens, step)]


def buffer_of(step: int) -> int:
    """Returns which buffer takes the block of a step (1 and on), in every layer and pass."""
    return (step - 1) % RING_BUFFERS


def ring_buffers(pages: Sequence[int]) -> list[Sequence[int]]:
    """Returns the pages of each of the ring's buffers, of all that a member lends."""
    each = len(pages) // RING_BUFFERS
    return [pages[i * each : (i + 1) * each] for i in range(RING_BUFFERS)]


def buffer_memory(pages: Sequence[int], kv_layers: int, num_pages: int) -> list[int]:
    """Returns a buffer's memory as pages of the pool seen as [layers * pages, ...], or of the pool
    of a stage. `kv_layers`: `KvLayout.buffer_layers`.

    For each page in order: its room in layer 0, 1, ..."""
    return [layer * num_pages + page for page in pages for layer in range(kv_layers)]


def layout(chunks: Sequence[Chunk], page_tokens: int, max_chunk_tokens: int) -> Layout:
    """Lays a request's prefill out. `chunks` follow each other; each group begins with the one
    before it. Tokens before the first chunk are history that decode holds.

    Raises ValueError when the chunks leave a gap or a group does not begin with the one before.
    """
    _check(chunks)
    keepers: dict[str, _Keeper] = {}
    fetched = _fetch(chunks[0], keepers, page_tokens)
    laid: list[ChunkShares] = []
    number = 0
    for chunk in chunks:
        moves = _balance(chunk, keepers, page_tokens)
        group = [keepers[instance_id] for instance_id in chunk.instance_ids]
        if len(group) > 1:
            for keeper in group:
                keeper.fill_page()
        passes = list(_passes(chunk, group, number, max_chunk_tokens))
        number += len(passes)
        shares = tuple(Share(keeper.pages[:], keeper.padded()) for keeper in group)
        laid.append(ChunkShares(chunk, tuple(passes), shares, tuple(moves)))
    taken = {instance_id: keeper.taken for instance_id, keeper in keepers.items()}
    return Layout(tuple(laid), taken, fetched, page_tokens)


def pages_taken(chunks: Sequence[Chunk], page_tokens: int, kv_layers: int) -> dict[str, int]:
    """Returns the pages that a request takes at each member of its last group, with ring buffers.

    Equals the count of `layout`, without laying anything out: the scheduler asks for every plan.
    `kv_layers` 0 leaves the buffers out.
    """
    live: list[int] = []  # pages of each rank's share
    taken: list[int] = []
    history, largest = chunks[0].start_token, 0
    tokens: list[int] = []  # in the slots of each rank's last pages, while the group is one alone
    for chunk in chunks:
        size = len(chunk.instance_ids)
        if not live:
            live = _even(ceil_div(history, page_tokens), size)
            taken = live[:]
            tokens = [history] if size == 1 else []
        elif size > len(live):
            targets = _targets(live, size)
            gained = [max(0, target - now) for target, now in _pairs(targets, live)]
            taken = [before + gain for before, gain in _pairs(gained, taken)]
            live = targets
        if size == 1:
            tokens[0] += chunk.num_tokens
            live[0] = taken[0] = ceil_div(tokens[0], page_tokens)
            continue
        for rank, share in enumerate(_even(chunk.num_tokens, size)):
            pages = ceil_div(share, page_tokens)
            live[rank] += pages
            taken[rank] += pages
        largest = max(largest, *live)
    buffers = RING_BUFFERS * ceil_div(largest, kv_layers) if kv_layers else 0
    return {
        instance_id: pages + buffers
        for instance_id, pages in zip(chunks[-1].instance_ids, taken, strict=True)
    }


class _Keeper:
    """A member while its share grows and shrinks."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.pages: array[int] = array("i")
        self.positions: array[int] = array("i")  # of the used slots
        self.taken = 0

    def fill_page(self) -> None:
        """Notes that the next token begins a page."""
        self.positions.extend([PAD] * (-len(self.positions) % self.page_tokens))

    def padded(self) -> array[int]:
        return self.positions + array("i", [PAD] * (-len(self.positions) % self.page_tokens))

    def take_pages(self, count: int) -> array[int]:
        taken = array("i", range(self.taken, self.taken + count))
        self.taken += count
        self.pages.extend(taken)
        return taken

    def add(self, start_token: int, num_tokens: int) -> Run:
        run = Run(start_token, num_tokens, len(self.positions))
        self.positions.extend(range(start_token, start_token + num_tokens))
        lacking = ceil_div(len(self.positions), self.page_tokens) - len(self.pages)
        if lacking:
            self.take_pages(lacking)
        return run

    def give_pages(self, keep: int) -> tuple[array[int], array[int]]:
        """Returns the pages beyond the first `keep`, and the positions in their slots."""
        pages, slots = self.pages[keep:], self.padded()[keep * self.page_tokens :]
        del self.pages[keep:]
        del self.positions[keep * self.page_tokens :]
        return pages, slots


def _check(chunks: Sequence[Chunk]) -> None:
    for before, after in pairwise(chunks):
        if after.start_token != before.start_token + before.num_tokens:
            raise ValueError(
                f"chunk {after.index} begins at token {after.start_token}, chunk {before.index} "
                f"ends at {before.start_token + before.num_tokens}"
            )
        if after.instance_ids[: len(before.instance_ids)] != before.instance_ids:
            raise ValueError(
                f"the group of chunk {after.index}, {after.instance_ids}, does not begin with "
                f"that of chunk {before.index}, {before.instance_ids}"
            )


def _fetch(
    chunk: Chunk, keepers: dict[str, _Keeper], page_tokens: int
) -> dict[str, tuple[Run, ...]]:
    """Spreads the history that decode holds over the first group."""
    pages = _even(ceil_div(chunk.start_token, page_tokens), len(chunk.instance_ids))
    start = 0
    fetched: dict[str, tuple[Run, ...]] = {}
    for instance_id, count in zip(chunk.instance_ids, pages, strict=True):
        keeper = keepers[instance_id] = _Keeper(page_tokens)
        tokens = min(count * page_tokens, chunk.start_token - start)
        fetched[instance_id] = (keeper.add(start, tokens),) if tokens else ()
        start += tokens
    return fetched


def _balance(chunk: Chunk, keepers: dict[str, _Keeper], page_tokens: int) -> list[Move]:
    """Spreads the history evenly over a larger group: returns the moves."""
    group = chunk.instance_ids
    old = [instance_id for instance_id in group if instance_id in keepers]
    new = group[len(old) :]
    if not new:
        return []
    even = _targets([len(keepers[i].pages) for i in old], len(group))
    targets = dict(zip(group, even, strict=True))
    for instance_id in new:
        keepers[instance_id] = _Keeper(page_tokens)
    moves: list[Move] = []
    wanting = iter(new)
    receiver = next(wanting)
    for giver in old:
        pages, slots = keepers[giver].give_pages(targets[giver])
        while pages:
            room = targets[receiver] - len(keepers[receiver].pages)
            if not room:
                receiver = next(wanting)
                continue
            count = min(room, len(pages))
            target = keepers[receiver].take_pages(count)
            keepers[receiver].positions.extend(slots[: count * page_tokens])
            moves.append(Move(giver, receiver, pages[:count], target))
            del pages[:count]
            del slots[: count * page_tokens]
    return moves


def _passes(
    chunk: Chunk, group: Sequence[_Keeper], number: int, max_chunk_tokens: int
) -> Iterator[GroupPass]:
    start = chunk.start_token
    for tokens in pass_tokens(chunk.num_tokens, len(group), max_chunk_tokens):
        runs = tuple(
            tuple(keeper.add(start + first, count) for first, count in shards if count)
            for keeper, shards in zip(group, zigzag(tokens, len(group)), strict=True)
        )
        yield GroupPass(number, start, tokens, runs, tuple(len(k.positions) for k in group))
        start += tokens
        number += 1


def _targets(live: Sequence[int], size: int) -> list[int]:
    """Returns the pages of each rank after those of the first ranks are spread over `size`.

    A rank that has pages gains none: pages above the even share go to the new ranks.
    """
    even = _even(sum(live), size)
    kept = [min(now, most) for now, most in zip(live, even, strict=False)]
    return kept + _even(sum(live) - sum(kept), size - len(live))


def _even(count: int, parts: int) -> list[int]:
    each, more = divmod(count, parts)
    return [each + (part < more) for part in range(parts)]


def _pairs(longer: Sequence[int], shorter: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Returns both, the shorter filled up with zeros."""
    for index, value in enumerate(longer):
        yield value, shorter[index] if index < len(shorter) else 0
