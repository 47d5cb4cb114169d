"""The inputs of the scheduler. `Machine.step(event, now_s)` is the only reader of events.

Instances are named by id. `generation` tells one incarnation of an instance from the next. Events
of an earlier incarnation are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace.core.cost.decode_step import DecodeStepTime
from millrace.core.cost.latency import SpLatency
from millrace.core.incarnation import Incarnation
from millrace.core.request import Request
from millrace.core.scheduler.held import Held
from millrace.core.scheduler.reports import Report
from millrace.core.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceJoined:
    """An instance registered. The same id with a higher generation replaces the earlier one."""

    instance_id: str
    generation: int
    role: str  # "prefill" | "decode" | "mixed" (both, packing its own batches) | "kvp"
    kv_pages: int
    page_tokens: int
    max_context_tokens: int
    max_batch: int
    model_hash: str
    latency: SpLatency = field(default_factory=SpLatency)
    node: str = ""  # instances of one node are close to each other; empty: a node of its own
    #: Layers of a page that a ring's buffers may use; 0: buffers are not counted.
    kv_layers: int = 0
    decode_step: DecodeStepTime | None = None  # of its batches; None: not known
    block_tokens: int = 0  # of its prefix cache; 0: it keeps none
    adaptive_chunks: bool = False  # mixed: chunks shrink as their history grows
    held: tuple[Held, ...] = ()  # requests that it holds from before, for another scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceLeft:
    """An instance's stream ended or its lease lapsed: all that it held is gone.

    `silent`: its lease lapsed. An instance whose stream ended may still live, and register again.
    """

    instance_id: str
    generation: int
    silent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """A registered instance sent a report."""

    instance_id: str
    generation: int
    report: Report


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceCordoned:
    """The autoscaler or an operator stops new work on the instance, or allows it again.

    The instance finishes the work that it has. An instance that leaves never takes new work again.
    """

    instance_id: str
    generation: int
    cordoned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A proxy submits a request."""

    request: Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Reopened:
    """A proxy that has connected again names a request that it has submitted before.

    `decode`: the instance from which the proxy expects tokens; None: it does not know one.
    `token_age_s`: seconds since the first token came; None: no token has come. `attempts`: the
    largest number that an attempt of another scheduler may have. An instance that is not back yet
    may still compute such an attempt, and nobody may take it for one of this scheduler.
    """

    request: Request
    decode: Incarnation | None = None
    token_age_s: float | None = None
    attempts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeoverBegan:
    """The scheduler leads in the place of another one, whose tables it does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeoverEnded:
    """All peers of the former leader have reported, or the wait for them is over.

    ``missing``: instances that it had or expected, by id; they may have come.
    """

    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class InstancesForgotten:
    """A peer had a former leader, and the store has lost whom that one had: there may be instances
    that nobody names.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested:
    """The client left, the proxy met a stop string, or a deadline passed.

    `proxy_id`: of the connection that asks. A request of another one stays: a client whom one proxy
    refused may have sent it to another one.
    """

    request_id: str
    reason: str
    proxy_id: str = ""  # a proxy need not say it


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyLeft:
    """A proxy's stream ended: no client reads the output of its requests any more."""

    proxy_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChanged:
    """From now on requests are ranked by another policy: a name of `core.priority.POLICIES`."""

    policy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsChanged:
    """From now on these classes and tenants have these weights. All others keep their weights.

    The scheduler's first event has the weights of the configuration.
    """

    weights: Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ImprovementRateChanged:
    """The improvement that a larger group needs from now on: a fixed rate, or a table.

    If `rate` is None, the table counts: `rows` of (arrivals per second, rate).
    """

    rate: float | None = None
    rows: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed: the machine checks deadlines."""


Event = (
    InstanceJoined
    | InstanceLeft
    | InstanceCordoned
    | Reported
    | Submitted
    | Reopened
    | TakeoverBegan
    | TakeoverEnded
    | InstancesForgotten
    | CancelRequested
    | ProxyLeft
    | PolicyChanged
    | WeightsChanged
    | ImprovementRateChanged
    | Tick
)
