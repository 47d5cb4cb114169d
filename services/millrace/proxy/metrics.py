"""The proxy's metrics.

To look up the child of a metric by its labels takes longer than to count: children are cached.
"""

from __future__ import annotations

from functools import cache

from prometheus_client import Counter

from millrace.core.limits.rules import Cost
from millrace.proxy.generation.objectives import judged
from millrace.proxy.generation.proxy_request import ProxyRequest
from millrace.telemetry.metrics import Registry, Sample

INFLIGHT = "millrace_proxy_inflight_requests"
PARKED = "millrace_proxy_parked_requests"
STREAMING = "millrace_proxy_streaming_requests"
WAITING = "millrace_proxy_waiting_requests"
_OPEN_REQUESTS = (
    (INFLIGHT, "that are submitted and have not ended"),
    (PARKED, "in flight that wait in the proxy until instances are ready"),
    (STREAMING, "in flight that have a token"),
    (WAITING, "in flight that have no token yet"),
)


class TenantMetrics:
    """What tenants use and are refused. The label is a tenant's name of the settings or the file of
    keys, never a key.
    """

    def __init__(self, registry: Registry) -> None:
        self._requests = registry.counter(
            "millrace_proxy_tenant_requests_total", "Requests that ended, by tenant.", ("tenant",)
        )
        self._prompt_tokens = registry.counter(
            "millrace_proxy_tenant_prompt_tokens_total",
            "Prompt tokens of requests that began, by tenant.",
            ("tenant",),
        )
        self._generated_tokens = registry.counter(
            "millrace_proxy_tenant_generated_tokens_total",
            "Tokens generated for a tenant.",
            ("tenant",),
        )
        self._refused = registry.counter(
            "millrace_proxy_tenant_refused_requests_total",
            "Requests refused for want of a key, by access or by a limit.",
            ("tenant", "reason"),
        )

        self._of_tenant = cache(self._counters)

    def used(self, tenant: str, cost: Cost) -> None:
        """Counts a request that was submitted and has ended."""
        requests, prompt_tokens, generated_tokens = self._of_tenant(tenant)
        requests.inc()
        prompt_tokens.inc(cost.prompt_tokens)
        generated_tokens.inc(cost.generated_tokens)

    def _counters(self, tenant: str) -> tuple[Counter, ...]:
        used = (self._requests, self._prompt_tokens, self._generated_tokens)
        return tuple(one.labels(tenant) for one in used)

    def refused(self, tenant: str, reason: str) -> None:
        self._refused.labels(tenant, reason).inc()


class ProxyMetrics:
    """The proxy's metrics. Latencies are in seconds."""

    def __init__(self, open_requests: Sample) -> None:
        """`open_requests` returns the gauges of open requests of every model."""
        self.registry = registry = Registry()
        self.tenants = TenantMetrics(registry)
        registry.gauges_by(
            "model", {name: f"Requests {which}." for name, which in _OPEN_REQUESTS}, open_requests
        )
        requests = registry.counter(
            "millrace_proxy_http_requests_total", "HTTP requests answered.", ("route", "code")
        )
        self._answered = cache(requests.labels)
        self.models = ModelFamilies(registry)
        self.batches = BatchMetrics(registry)
        self.streams = registry.counter(
            "millrace_proxy_resumable_requests_total",
            "Events of resumable streams: started, resumed by a client, adopted from another "
            "replica, released to others at shutdown, fenced off by another replica, restored to a "
            "store that had lost it, expired without a client, diverged.",
            ("event",),
        )

    def answered(self, route: str, status: int) -> None:
        """Counts an answer to an HTTP request."""
        self._answered(route, status).inc()


class ModelFamilies:
    """The metrics that have a series for each model."""

    def __init__(self, registry: Registry) -> None:
        self.finished = registry.counter(
            "millrace_proxy_finished_requests_total",
            "Requests that ended without an error, by the reason of their first choice.",
            ("model", "reason"),
        )
        self.moved = registry.counter(
            "millrace_proxy_moved_requests_total",
            "Migrations of requests to another instance, by reason.",
            ("model", "reason"),
        )
        self.cancelled = registry.counter(
            "millrace_proxy_cancelled_requests_total",
            "Cancelled requests, by reason.",
            ("model", "reason"),
        )
        self.tokens = registry.counter(
            "millrace_proxy_generated_tokens_total",
            "Tokens received from decode instances.",
            ("model",),
        )
        self.prompt_tokens = registry.counter(
            "millrace_proxy_prompt_tokens_total", "Prompt tokens of finished requests.", ("model",)
        )
        self.cached_tokens = registry.counter(
            "millrace_proxy_cached_prompt_tokens_total",
            "Prompt tokens of finished requests whose KV was found in a cache.",
            ("model",),
        )
        self.ttft = registry.histogram(
            "millrace_proxy_ttft_seconds",
            "Time from arrival to first token.",
            ("model", "slo_class"),
        )
        self.tbt = registry.histogram(
            "millrace_proxy_tbt_seconds", "Time between a request's tokens.", ("model",)
        )
        self.e2e = registry.histogram(
            "millrace_proxy_e2e_seconds",
            "Time from arrival to last token.",
            ("model", "slo_class"),
        )
        self.slo = registry.counter(
            "millrace_proxy_slo_requests_total",
            "Finished requests with an objective, by whether they met it. TBT is a request's mean.",
            ("model", "slo_class", "objective", "met"),
        )


class ModelMetrics:
    """The metrics of one model's requests."""

    def __init__(self, families: ModelFamilies, model: str) -> None:
        self._families = families
        self._model = model
        self._finished = cache(families.finished.labels)
        self._ttft, self._e2e = cache(families.ttft.labels), cache(families.e2e.labels)
        self._slo = cache(families.slo.labels)
        self.tokens = families.tokens.labels(model)
        self.tbt = families.tbt.labels(model)
        self._prompt_tokens = families.prompt_tokens.labels(model)
        self._cached_tokens = families.cached_tokens.labels(model)

    def moved(self, reason: str) -> None:
        self._families.moved.labels(self._model, reason).inc()

    def cancelled(self, reason: str) -> None:
        self._families.cancelled.labels(self._model, reason).inc()

    def finished(self, request: ProxyRequest) -> None:
        """Counts a request that ended without an error."""
        self._prompt_tokens.inc(request.prompt_tokens)
        if request.cached_tokens:
            self._cached_tokens.inc(request.cached_tokens)
        reason = request.choices[0].finish_reason or ""
        self._finished(self._model, reason).inc()
        first = request.first_token_at
        assert first is not None  # a request that ended had a token
        if request.adoption:
            return  # this replica does not know when the first tokens were sent
        model, name = self._model, request.slo.class_name
        objectives = dict(judged(request))
        slow = request.moves > 0 or not all(objectives.values())
        exemplar = request.trace.exemplar_of(kept=slow)
        ttft_s = first - request.arrived_at
        self._ttft(model, name).observe(ttft_s, exemplar)
        e2e_s = request.last_token_at - request.arrived_at
        self._e2e(model, name).observe(e2e_s, exemplar)
        for objective, met in objectives.items():
            self._slo(model, name, objective, str(met).lower()).inc()


class BatchMetrics:
    """What becomes of batches at this process."""

    def __init__(self, registry: Registry) -> None:
        self.running = registry.gauge(
            "millrace_proxy_running_batches", "Batches that this process runs."
        )
        self._states = registry.counter(
            "millrace_proxy_batch_changes_total", "Batches that entered a state.", ("state",)
        )
        self._lines = registry.counter(
            "millrace_proxy_batch_requests_total",
            "Requests of batches whose result is recorded: in the output file or the error file.",
            ("result",),
        )

    def entered(self, state: str) -> None:
        self._states.labels(state).inc()

    def lines(self, completed: int, failed: int) -> None:
        self._lines.labels("completed").inc(completed)
        self._lines.labels("failed").inc(failed)
