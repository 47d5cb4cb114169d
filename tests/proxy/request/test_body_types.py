"""Types of bodies are built once for the same limits, and every limit has types of its own."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from millrace.core.config.proxy import ProxyConfig
from millrace.proxy.errors import ApiError
from millrace.proxy.request.options import Limits
from millrace.proxy.request.validation import Bodies

CONFIG = ProxyConfig(max_new_tokens=40, max_logprobs=5, max_choices=3)
LIMITS = Limits(
    model="tiny", vocab_size=100, context_tokens=1000, eos_token_ids=(1,), config=CONFIG
)


@pytest.mark.parametrize(
    ("field", "most", "more"),
    [
        ("max_tokens", 40, replace(LIMITS, config=replace(CONFIG, max_new_tokens=41))),
        ("logprobs", 5, replace(LIMITS, config=replace(CONFIG, max_logprobs=6))),
        ("n", 3, replace(LIMITS, config=replace(CONFIG, max_choices=4))),
        ("truncate_prompt_tokens", 1000, replace(LIMITS, context_tokens=1001)),
        ("prompt", [99], replace(LIMITS, vocab_size=101)),
    ],
)
def test_every_limit_has_types_of_its_own(field: str, most: int | list[int], more: Limits) -> None:
    def read(limits: Limits, value: int | list[int]) -> None:
        body = {"model": "tiny", "prompt": "hi", field: value}
        Bodies(limits).read_completion(json.dumps(body).encode())

    beyond = [most[0] + 1] if isinstance(most, list) else most + 1
    read(LIMITS, most)
    read(more, beyond)
    with pytest.raises(ApiError, match=field):
        read(LIMITS, beyond)


def test_equal_limits_share_their_types() -> None:
    assert Bodies(LIMITS).types is Bodies(replace(LIMITS, model="other")).types
