"""The headers of limits, in OpenAI's forms."""

from __future__ import annotations

import pytest

from millrace.core.limits.rules import Level
from millrace.proxy.tenancy.rate_headers import duration, rate_headers


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (0, "0ms"),
        (120, "120ms"),
        (1000, "1s"),
        (1500, "1.5s"),
        (59_999, "59.999s"),
        (60_000, "1m0s"),
        (360_000, "6m0s"),
        (61_250, "1m1.25s"),
        (3_600_000, "1h0m0s"),
        (86_399_999, "23h59m59.999s"),
    ],
)
def test_a_duration_has_the_form_of_openai(milliseconds, text):
    assert duration(milliseconds) == text


def test_of_several_meters_the_one_with_the_least_left_is_shown():
    levels = [
        Level(meter="requests_per_minute", limit=60, used=1, reset_ms=1000),
        Level(meter="tokens_per_minute", limit=1000, used=100, reset_ms=6000),
        Level(meter="tokens_per_day", limit=5000, used=4900, reset_ms=3_600_000),
    ]
    assert dict(rate_headers(levels)) == {
        b"x-ratelimit-limit-requests": b"60",
        b"x-ratelimit-remaining-requests": b"59",
        b"x-ratelimit-reset-requests": b"1s",
        b"x-ratelimit-limit-tokens": b"5000",
        b"x-ratelimit-remaining-tokens": b"100",
        b"x-ratelimit-reset-tokens": b"1h0m0s",
    }
    assert rate_headers([]) == []
