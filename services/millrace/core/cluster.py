"""The instances as the scheduler knows them, and what each holds.

Every page and task slot that a request occupies stands in a `Holding` at the instance; sums are
kept beside them. A holding outlives its request: it goes when the instance says that the pages
are free, or when the instance dies. Leases are the driver's matter: it turns silence into
`InstanceLeft`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace.core.decode_placement import pages_needed
from millrace.core.events import InstanceJoined
from millrace.core.request import Request
from millrace.core.waiting_line import WaitingLine


@dataclass(slots=True, kw_only=True, eq=False)
class Holding:
    """What one attempt of a request occupies at one instance."""

    pages: int
    sequences: int = 1  # decode: choices, which join the batch together
    leaving: bool = False  # nobody waits for this attempt any more; the pages are not yet free
    decoding: bool = False  # decode: in the batch


@dataclass(slots=True, eq=False)
class PrefillInstance:
    """A prefill instance: pages of prompts, and the tasks it holds in the order it got them."""

    card: InstanceJoined
    draining: bool = False
    running: int = 0  # as its last heartbeat said, like `waiting`
    waiting: int = 0
    holdings: dict[str, Holding] = field(default_factory=dict)
    used_pages: int = 0
    tasks: dict[str, float] = field(default_factory=dict)  # request id -> predicted seconds
    tasks_s: float = 0.0
    started_s: dict[str, float] = field(default_factory=dict)  # tasks that run -> since when

    @property
    def id(self) -> str:
        return self.card.instance_id

    @property
    def free_pages(self) -> int:
        return self.card.kv_pages - self.used_pages

    def pages_for(self, request: Request) -> int:
        """Pages of the prompt; token one is sampled here, but its cache is decode's."""
        return -(-request.prompt_tokens // self.card.page_tokens)

    def could_hold(self, request: Request) -> bool:
        """Whether the request fits once others left, and no earlier attempt of it is still here."""
        return (
            self.pages_for(request) <= self.card.kv_pages
            and request.prompt_tokens <= self.card.max_context_tokens
            and request.id not in self.holdings
        )

    def has_room(self, request: Request) -> bool:
        """Whether the request's pages are free now."""
        return (
            self.pages_for(request) <= self.card.kv_pages - self.used_pages
            and request.prompt_tokens <= self.card.max_context_tokens
            and request.id not in self.holdings
        )

    def outstanding_s(self, now_s: float) -> float:
        """Predicted seconds until all tasks are done; of a running one what remains, at least 0."""
        if not self.started_s:
            return self.tasks_s
        done_s = 0.0
        for request_id, started_s in self.started_s.items():
            done_s += min(max(now_s - started_s, 0.0), self.tasks[request_id])
        return self.tasks_s - done_s

    def hold(self, request: Request, predicted_s: float) -> None:
        pages = self.pages_for(request)
        self.holdings[request.id] = Holding(pages=pages)
        self.used_pages += pages
        self.tasks[request.id] = predicted_s
        self.tasks_s += predicted_s

    def end_task(self, request_id: str) -> bool:
        """Frees the task slot; False when the request has none."""
        if self.tasks.pop(request_id, None) is None:
            return False
        self.started_s.pop(request_id, None)
        # Summed anew: a handful of tasks, and no rounding error builds up.
        self.tasks_s = sum(self.tasks.values())
        return True

    def release(self, request_id: str) -> None:
        """Frees the request's pages and its task slot."""
        self.end_task(request_id)
        self.used_pages -= self.holdings.pop(request_id).pages


@dataclass(slots=True, eq=False)
class DecodeInstance:
    """A decode instance: pages of requests in its batch, and of those on their way to it."""

    card: InstanceJoined
    draining: bool = False
    running: int = 0
    waiting: int = 0
    holdings: dict[str, Holding] = field(default_factory=dict)
    decoding_pages: int = 0
    virtual_pages: int = 0
    batch_size: int = 0  # sequences

    @property
    def id(self) -> str:
        return self.card.instance_id

    @property
    def page_tokens(self) -> int:
        return self.card.page_tokens

    @property
    def free_pages(self) -> int:
        """Pages that no decoding request holds; those on their way are `virtual_pages`."""
        return self.card.kv_pages - self.decoding_pages

    def pages_for(self, request: Request) -> int:
        return pages_needed(
            request.prompt_tokens, request.max_new_tokens, request.choices, self.card.page_tokens
        )

    def could_hold(self, request: Request) -> bool:
        """Whether the request fits once others left, and no earlier attempt of it is still here."""
        return (
            self.pages_for(request) <= self.card.kv_pages
            and request.prompt_tokens + request.max_new_tokens <= self.card.max_context_tokens
            and request.choices <= self.card.max_batch
            and request.id not in self.holdings
        )

    def has_room(self, request: Request) -> bool:
        """Whether the pages of a request that it could hold are free now."""
        return self.pages_for(request) <= (
            self.card.kv_pages - self.decoding_pages - self.virtual_pages
        )

    def hold(self, request: Request) -> None:
        pages = self.pages_for(request)
        self.holdings[request.id] = Holding(pages=pages, sequences=request.choices)
        self.virtual_pages += pages

    def start(self, request_id: str) -> None:
        """The request's cache has landed: its usage is no longer virtual."""
        holding = self.holdings[request_id]
        holding.decoding = True
        self.virtual_pages -= holding.pages
        self.decoding_pages += holding.pages
        self.batch_size += holding.sequences

    def release(self, request_id: str) -> None:
        holding = self.holdings.pop(request_id)
        if holding.decoding:
            self.decoding_pages -= holding.pages
            self.batch_size -= holding.sequences
        else:
            self.virtual_pages -= holding.pages


Instance = PrefillInstance | DecodeInstance


@dataclass(slots=True, eq=False)
class Pool:
    """Instances of one model hash; only those within a pool are ever paired.

    `prefill` and `decode` hold the instances that take new work, `members` counts draining ones
    too.
    """

    prefill: dict[str, PrefillInstance] = field(default_factory=dict)
    decode: dict[str, DecodeInstance] = field(default_factory=dict)
    members: int = 0
    line: WaitingLine = field(default_factory=WaitingLine)  # placed, waiting for a prefill slot

    @property
    def is_ready(self) -> bool:
        """Whether new work can be both prefilled and decoded here."""
        return bool(self.prefill and self.decode)

    def prefill_s(self, request: Request) -> float:
        """Predicted prefill of the whole prompt. A pool's instances are taken to be of one kind."""
        latency = next(iter(self.prefill.values())).card.latency
        return latency.chunk_s(request.prompt_tokens, 0)

    def could_prefill(self, request: Request) -> bool:
        return any(p.could_hold(request) for p in self.prefill.values())

    def could_decode(self, request: Request) -> bool:
        return any(d.could_hold(request) for d in self.decode.values())


class Cluster:
    """All instances by id, and by the hash of the model that they serve."""

    def __init__(self) -> None:
        self.instances: dict[str, Instance] = {}
        self.pools: dict[str, Pool] = {}

    def current(self, instance_id: str, generation: int) -> Instance | None:
        """The instance, if this is the life of it that the scheduler knows."""
        instance = self.instances.get(instance_id)
        if instance is None or instance.card.generation != generation:
            return None
        return instance

    def pool_of(self, instance: Instance) -> Pool:
        return self.pools[instance.card.model_hash]

    def ready_pools(self) -> list[Pool]:
        return [pool for pool in self.pools.values() if pool.is_ready]

    def add(self, card: InstanceJoined) -> Instance:
        """A new instance that holds nothing. The id must be free."""
        pool = self.pools.setdefault(card.model_hash, Pool())
        pool.members += 1
        instance: Instance
        if card.role == "prefill":
            instance = pool.prefill[card.instance_id] = PrefillInstance(card)
        else:
            instance = pool.decode[card.instance_id] = DecodeInstance(card)
        self.instances[card.instance_id] = instance
        return instance

    def drain(self, instance: Instance) -> None:
        """No new work for the instance."""
        instance.draining = True
        pool = self.pool_of(instance)
        pool.prefill.pop(instance.id, None)
        pool.decode.pop(instance.id, None)

    def remove(self, instance: Instance) -> None:
        """Forgets the instance and all that it holds."""
        self.drain(instance)
        del self.instances[instance.id]
        self.pool_of(instance).members -= 1

    def drop_if_empty(self, model_hash: str) -> None:
        """Forgets a pool that has no instance, draining ones included."""
        if self.pools[model_hash].members == 0:
            del self.pools[model_hash]
