"""Counts the tokens of a response's requests, before and after they are served."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.core.limits.rules import Cost
from millrace.proxy.errors import ApiError
from millrace.proxy.generation.proxy_request import ProxyRequest

#: The status of a client that left.
_LEFT = 499


def reserved_cost(requests: Sequence[ProxyRequest]) -> Cost:
    """Returns the prompts and all tokens that the requests may generate."""
    samplings = [request.spec.sampling for request in requests]
    return Cost(
        prompt_tokens=sum(request.prompt_tokens for request in requests),
        generated_tokens=sum(one.max_tokens * one.n for one in samplings),
    )


def used_cost(requests: Sequence[ProxyRequest], error: ApiError | None) -> Cost:
    """Returns what the requests used. `error` ended the response.

    A prompt counts if its answer began, or if its client left before: prefill may have computed the
    prompt. It does not count if the server refused or lost the request before its first token.
    """
    left = error is None or error.status == _LEFT
    return Cost(
        prompt_tokens=sum(one.prompt_tokens for one in requests if left or one.has_begun),
        generated_tokens=sum(one.completion_tokens for one in requests),
    )
