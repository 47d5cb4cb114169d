"""Which of its objectives a request has met so far."""

from __future__ import annotations

from collections.abc import Iterator

from millrace.proxy.generation.proxy_request import ProxyRequest


def missed(request: ProxyRequest) -> list[str]:
    """Lists the objectives that the request has missed so far: ttft, e2e, tbt (its mean)."""
    return [name for name, met in judged(request) if not met]


def judged(request: ProxyRequest) -> Iterator[tuple[str, bool]]:
    """Yields each objective that can be judged, and whether it is met; none if adopted: this
    replica does not know when the first tokens were sent.
    """
    first, slo = request.first_token_at, request.slo
    if first is None or request.adoption:
        return
    if slo.ttft_s is not None:
        yield "ttft", first - request.arrived_at <= slo.ttft_s
    if slo.e2e_s is not None:
        yield "e2e", request.last_token_at - request.arrived_at <= slo.e2e_s
    steps = request.completion_tokens // len(request.choices) - 1
    if slo.tbt_s is not None and steps > 0:
        yield "tbt", (request.last_token_at - first) / steps <= slo.tbt_s
