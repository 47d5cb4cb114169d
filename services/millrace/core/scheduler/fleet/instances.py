"""The instances as the scheduler knows them, and what each holds.

Every page and task slot that a request occupies stands in a `Holding` at the instance; sums are
kept beside them. A holding outlives its request: it goes when the instance says that the pages
are free, or when the instance dies. Leases are the driver's matter: it turns silence into
`InstanceLeft`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from millrace.core.instance.standstill import Standstill
from millrace.core.kv.pages import pages_for, pages_of_request
from millrace.core.live_request import LiveRequest
from millrace.core.request import Shard
from millrace.core.scheduler.events import InstanceJoined
from millrace.core.scheduler.fleet.cached_prefixes import CachedPrefixes
from millrace.core.scheduler.fleet.freeness import freeness
from millrace.core.scheduler.fleet.task import Task
from millrace.core.scheduler.reports import Heartbeat

#: The longest iteration of a mixed instance with prompts: the default of `mixed.t_target_ms`.
MIXED_TARGET_S: Final = 0.05


@dataclass(slots=True, kw_only=True, eq=False)
class Holding:
    """The pages and slots of one attempt of a request at one instance."""

    pages: int
    sequences: int = 1  # decode: choices, which join the batch together
    leaving: bool = False  # no request needs this attempt any more; the pages are not yet free
    decoding: bool = False  # decode: in the batch
    is_shard: bool = False  # decode: of a request of another KV owner
    #: Of a shard: another scheduler has placed it, and may have heard that it is free again.
    is_adopted: bool = False
    context_tokens: int = 0  # decode: that the pages are for, read in every step
    tbt_s: float = math.inf  # decode: the pace that keeps the request's objectives


@dataclass(slots=True, eq=False)
class PrefillInstance:
    """A prefill instance: pages of prompts, and the tasks it holds, the first one to run first."""

    card: InstanceJoined
    bit: int = 0  # its own bit among the pool's prefill instances
    leaving: bool = False  # it said so
    draining: bool = False  # takes no new work: it is leaving, or cordoned
    running: int = 0  # as its last heartbeat said, like `waiting`
    waiting: int = 0
    holdings: dict[str, Holding] = field(default_factory=dict)
    used_pages: int = 0
    queue: list[Task] = field(default_factory=list)
    standstill: Standstill | None = None  # as its last heartbeat said
    still_since_s: dict[str, float] = field(default_factory=dict)  # with this request prepared
    prefixes: CachedPrefixes = field(init=False)

    def __post_init__(self) -> None:
        self.prefixes = CachedPrefixes(self.card)

    @property
    def id(self) -> str:
        return self.card.instance_id

    @property
    def free_pages(self) -> int:
        return self.card.kv_pages - self.used_pages

    @property
    def free_slots(self) -> int:
        """Returns the free pages, as tokens."""
        return self.free_pages * self.card.page_tokens

    def could_hold(self, request: LiveRequest, slots: int) -> bool:
        """Whether so many slots fit once it is empty, and no earlier attempt is still here."""
        return self.is_large_enough(request, slots) and request.id not in self.holdings

    def is_large_enough(self, request: LiveRequest, slots: int) -> bool:
        """Whether so many slots fit once it is empty, and the prompt is within its context."""
        card = self.card
        in_context = request.prompt_tokens <= card.max_context_tokens
        return in_context and slots <= card.kv_pages * card.page_tokens

    def takes(self, request: LiveRequest) -> bool:
        """Whether the prompt is within its context, and no earlier attempt is still here."""
        return (
            request.prompt_tokens <= self.card.max_context_tokens
            and request.id not in self.holdings
        )

    def heard(self, report: Heartbeat) -> None:
        """Takes in a heartbeat."""
        self.running = report.running
        self.waiting = report.waiting

    def outstanding_s(self, now_s: float) -> float:
        """Returns the predicted seconds of all tasks; of a running task the rest, at least 0."""
        return sum(task.remaining_s(now_s) for task in self.queue)

    def hold(self, request: LiveRequest, pages: int) -> None:
        self.holdings[request.id] = Holding(pages=pages)
        self.used_pages += pages

    def release(self, request_id: str) -> None:
        """Frees the request's pages."""
        self.used_pages -= self.holdings.pop(request_id).pages


@dataclass(slots=True, eq=False)
class KvpInstance:
    """A KVP worker: shards of requests of KV owners (see `kvp_placement`)."""

    card: InstanceJoined
    leaving: bool = False
    draining: bool = False
    running: int = 0
    waiting: int = 0
    holdings: dict[str, Holding] = field(default_factory=dict)
    used_pages: int = 0

    @property
    def id(self) -> str:
        return self.card.instance_id

    @property
    def page_tokens(self) -> int:
        return self.card.page_tokens

    @property
    def open_pages(self) -> int:
        """Returns the pages that nothing holds and nothing has reserved."""
        return self.card.kv_pages - self.used_pages

    def heard(self, report: Heartbeat) -> None:
        """Takes in a heartbeat."""
        self.running = report.running
        self.waiting = report.waiting

    def hold_shard(self, request_id: str, shard: Shard, *, is_adopted: bool = False) -> None:
        pages = pages_for(shard.num_tokens, self.page_tokens)
        self.holdings[request_id] = Holding(
            pages=pages, sequences=0, is_shard=True, is_adopted=is_adopted
        )
        self.used_pages += pages

    def release(self, request_id: str) -> None:
        self.used_pages -= self.holdings.pop(request_id).pages


@dataclass(slots=True, eq=False)
class DecodeInstance:
    """A decode instance: pages of requests in its batch, and of requests on their way to it.

    It may also hold pages of shards of other KV owners' requests.
    """

    card: InstanceJoined
    headroom_tokens: int | None = None  # of an answer, that pages are booked for; None: all of it
    leaving: bool = False
    draining: bool = False
    running: int = 0
    waiting: int = 0
    tbt_s: float = 0.0  # as the last heartbeat said that knew; 0: none did
    holdings: dict[str, Holding] = field(default_factory=dict)
    decoding_pages: int = 0
    virtual_pages: int = 0
    shard_pages: int = 0
    booked_pages: int = 0  # all of these
    batch_size: int = 0  # sequences
    sequences: int = 0  # in the batch or on their way to it
    context_tokens: int = 0  # of all holdings
    tightest_tbt_s: float = math.inf  # of all holdings
    busy_until_s: float = 0.0  # mixed: when its prompts are computed, as predicted
    #: By its last heartbeat, and what was booked and freed since; None where answers do not grow.
    reported_free_pages: int | None = None
    freeness: float = field(init=False)  # kept, since every arrival compares all instances
    prefixes: CachedPrefixes = field(init=False)

    def __post_init__(self) -> None:
        self.prefixes = CachedPrefixes(self.card)
        self._rate()

    def _rate(self) -> None:
        """Notes the freeness, after a change of pages or of the batch."""
        tokens = self.page_tokens
        self.freeness = freeness(
            self.free_pages * tokens, self.virtual_pages * tokens, self.batch_size
        )

    @property
    def id(self) -> str:
        return self.card.instance_id

    @property
    def page_tokens(self) -> int:
        return self.card.page_tokens

    @property
    def free_pages(self) -> int:
        """The pages that no decoding request and no shard holds; virtual usage does not count."""
        if self.reported_free_pages is not None:
            return self.open_pages + self.virtual_pages
        return self.card.kv_pages - self.decoding_pages - self.shard_pages

    @property
    def open_pages(self) -> int:
        """Returns the pages that nothing holds and nothing has reserved."""
        unbooked = self.card.kv_pages - self.booked_pages
        free = self.reported_free_pages
        return unbooked if free is None or unbooked < free else max(free, 0)

    def heard(self, report: Heartbeat) -> None:
        """Takes in a heartbeat. Where answers grow, they take pages that were not booked."""
        self.running = report.running
        self.waiting = report.waiting
        self.tbt_s = report.tbt_s or self.tbt_s
        if self.headroom_tokens is not None:
            self.reported_free_pages = report.free_pages
            self._rate()

    def pages_for(self, request: LiveRequest) -> int:
        """Returns the pages of the request at its full length, if it is held here alone."""
        return pages_of_request(
            request.prompt_tokens, request.max_new_tokens, request.choices, self.card.page_tokens
        )

    def booked_for(self, request: LiveRequest) -> int:
        """Returns how many of these pages are booked."""
        return pages_of_request(
            request.prompt_tokens,
            self._new_tokens(request),
            request.choices,
            self.card.page_tokens,
        )

    def _new_tokens(self, request: LiveRequest) -> int:
        """The tokens per choice that pages are booked for: all, if there are several choices.

        Several choices are not migrated to make room for others: they would share no pages then.
        """
        headroom, tokens = self.headroom_tokens, request.max_new_tokens
        if headroom is None or tokens < headroom or request.choices > 1:
            return tokens
        return headroom

    def is_large_enough(self, request: LiveRequest) -> bool:
        """Returns whether all of the request fits here once the instance is empty."""
        card = self.card  # as `could_run` and `pages_for`, written out: computed for every arrival
        prompt, new, choices = request.prompt_tokens, request.max_new_tokens, request.choices
        return (
            pages_of_request(prompt, new, choices, card.page_tokens) <= card.kv_pages
            and prompt + new <= card.max_context_tokens
            and choices <= card.max_batch
        )

    def could_run(self, request: LiveRequest) -> bool:
        """Returns whether the request is within the context and the batch, wherever its KV is."""
        return (
            request.prompt_tokens + request.max_new_tokens <= self.card.max_context_tokens
            and request.choices <= self.card.max_batch
        )

    def could_hold(self, request: LiveRequest) -> bool:
        """Whether the request fits once the instance is empty, and no earlier attempt is here."""
        return self.is_large_enough(request) and request.id not in self.holdings

    def has_pages(self, request: LiveRequest) -> bool:
        """Whether a request that it could hold has free pages now, at any pace."""
        if self.headroom_tokens is not None:
            return self.booked_for(request) <= self.open_pages
        card = self.card  # written out, too
        prompt, new, choices = request.prompt_tokens, request.max_new_tokens, request.choices
        pages = pages_of_request(prompt, new, choices, card.page_tokens)
        return pages <= card.kv_pages - self.booked_pages

    def keeps_pace(self, context_tokens: int, sequences: int = 0, tbt_s: float = math.inf) -> bool:
        """Returns whether steps with so much more in the batch keep all paces and `tbt_s`.

        An empty batch takes any request: no other instance could be faster for it.
        """
        step, tightest_s = self.card.decode_step, self.tightest_tbt_s
        if tbt_s < tightest_s:
            tightest_s = tbt_s
        if step is None or not self.sequences or tightest_s == math.inf:
            return True
        sequences, context_tokens = self.sequences + sequences, self.context_tokens + context_tokens
        return step.seconds(sequences, context_tokens) <= tightest_s

    def step_with_s(self, request: LiveRequest, *, alone: bool = False) -> float:
        """Returns the seconds of a step with the request, or of it `alone`; 0: not known."""
        step, more = self.card.decode_step, request.choices
        if step is None:
            return self.tbt_s
        tokens = more * (request.prompt_tokens + self._new_tokens(request))
        if alone:
            return step.seconds(more, tokens)
        return step.seconds(self.sequences + more, self.context_tokens + tokens)

    def hold(self, request: LiveRequest, shard: Shard | None = None) -> None:
        """Reserves for a request whose KV owner this is: for all of it, or its first shard."""
        if shard is None:
            pages = self.booked_for(request)
            tokens = request.choices * (request.prompt_tokens + self._new_tokens(request))
        else:
            pages, tokens = pages_for(shard.num_tokens, self.page_tokens), shard.num_tokens
        tbt_s = request.pace_s
        if tbt_s < self.tightest_tbt_s:
            self.tightest_tbt_s = tbt_s
        self.virtual_pages += pages
        holding = Holding(
            pages=pages, sequences=request.choices, context_tokens=tokens, tbt_s=tbt_s
        )
        self._take(request.id, holding)

    def hold_shard(self, request_id: str, shard: Shard, *, is_adopted: bool = False) -> None:
        pages = pages_for(shard.num_tokens, self.page_tokens)
        self.shard_pages += pages
        self._take(
            request_id,
            Holding(
                pages=pages,
                sequences=0,
                is_shard=True,
                is_adopted=is_adopted,
                context_tokens=shard.num_tokens,
            ),
        )

    def _take(self, request_id: str, holding: Holding) -> None:
        self.holdings[request_id] = holding
        self.booked_pages += holding.pages
        self.sequences += holding.sequences
        self.context_tokens += holding.context_tokens
        if self.reported_free_pages is not None:
            self.reported_free_pages -= holding.pages
        self._rate()

    def start(self, request_id: str) -> None:
        """Notes that the request's cache has landed: its usage is no longer virtual."""
        holding = self.holdings[request_id]
        holding.decoding = True
        self.virtual_pages -= holding.pages
        self.decoding_pages += holding.pages
        self.batch_size += holding.sequences
        self._rate()

    def keep_pace(self, request: LiveRequest) -> None:
        """Takes over the pace that the request needs now, which holds for its answer."""
        holding = self.holdings[request.id]
        before_s, holding.tbt_s = holding.tbt_s, request.pace_s
        self._tighten(before_s, holding.tbt_s)

    def _tighten(self, before_s: float, after_s: float) -> None:
        """Finds the tightest pace again, after one holding's pace has changed."""
        if after_s <= self.tightest_tbt_s:
            self.tightest_tbt_s = after_s
        elif before_s <= self.tightest_tbt_s < math.inf:
            left = (other.tbt_s for other in self.holdings.values())
            self.tightest_tbt_s = min(left, default=math.inf)

    # ---- prefill, at a mixed instance

    def prefill_s(self, request: LiveRequest) -> float:
        """Returns the predicted seconds of the prompt beside the running answers, at role mixed.

        An iteration may take as long as the tightest pace, at most `MIXED_TARGET_S`. What the
        answers take of it beyond a pass of chunks is not left for prompts.
        """
        tokens = request.prompt_tokens - request.kept_tokens
        alone_s = self.card.latency.chunk_s(tokens, request.kept_tokens, 1)
        step = self.card.decode_step
        if step is None or not self.batch_size:
            return alone_s
        target_s = min(self.tightest_tbt_s, request.pace_s, MIXED_TARGET_S)
        answers_s = step.per_sequence_s * self.batch_size
        share = self.batch_size / self.sequences
        answers_s += step.per_context_token_s * share * self.context_tokens
        return alone_s * target_s / max(target_s - answers_s, 0.1 * target_s)

    def backlog_s(self, now_s: float) -> float:
        """Returns the predicted seconds of the prompts that it has yet to compute."""
        return max(self.busy_until_s - now_s, 0.0) if self.virtual_pages else 0.0

    def prefills(self, request: LiveRequest, now_s: float) -> None:
        """Notes that it computes the request's prompt from now on, beside those that it has."""
        self.busy_until_s = now_s + self.backlog_s(now_s) + self.prefill_s(request)

    def release(self, request_id: str) -> None:
        holding = self.holdings.pop(request_id)
        if holding.is_shard:
            self.shard_pages -= holding.pages
        elif holding.decoding:
            self.decoding_pages -= holding.pages
            self.batch_size -= holding.sequences
        else:
            self.virtual_pages -= holding.pages
        self.booked_pages -= holding.pages
        self.sequences -= holding.sequences
        self.context_tokens -= holding.context_tokens
        if self.reported_free_pages is not None:
            self.reported_free_pages += holding.pages
        self._rate()
        self._tighten(holding.tbt_s, math.inf)


KvInstance = KvpInstance | DecodeInstance
Instance = PrefillInstance | DecodeInstance | KvpInstance
