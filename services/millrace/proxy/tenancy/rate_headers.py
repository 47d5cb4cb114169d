"""The headers by which OpenAI's clients learn what their limits leave, and the errors beyond."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from millrace.core.limits.rules import Charge, Level, TooLarge
from millrace.proxy.errors import NO_RETRY, ApiError
from millrace.state.limits import AccountCharge, Verdict

#: The wait that a client is told when too many of its requests are open: nobody knows the time.
CONCURRENCY_WAIT_MS = 1000

Headers = list[tuple[bytes, bytes]]


def duration(milliseconds: int) -> str:
    """Returns a time as OpenAI's headers have it, in the form of Go: `120ms`, `1.5s`, `6m0s`."""
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    seconds = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{seconds}"
    return f"{minutes}m{seconds}" if minutes else seconds


def rate_headers(levels: Sequence[Level]) -> Headers:
    """Returns the six headers, of the meters that have the least left; fewer without limits."""
    requests = [level for level in levels if level.meter.startswith("requests")]
    tokens = [level for level in levels if not level.meter.startswith("requests")]
    return [*_of_kind("requests", requests), *_of_kind("tokens", tokens)]


def _of_kind(kind: str, levels: Iterable[Level]) -> Headers:
    tightest = min(levels, key=lambda level: level.left, default=None)
    if tightest is None:
        return []
    return [
        (f"x-ratelimit-limit-{kind}".encode(), b"%d" % tightest.limit),
        (f"x-ratelimit-remaining-{kind}".encode(), b"%d" % tightest.left),
        (f"x-ratelimit-reset-{kind}".encode(), duration(tightest.reset_ms).encode()),
    ]


def limit_reached(verdict: Verdict, wanted: Sequence[AccountCharge], of: str) -> ApiError:
    """Returns the 429 error of a request that asked for `wanted`. `of` says whose limit it is."""
    wait_ms = verdict.wait_ms or CONCURRENCY_WAIT_MS
    [account] = [one for one in wanted if one.account == verdict.account]
    what = f"concurrency: limit {account.concurrency}, and as many requests are open."
    for charge, level in _with_levels(verdict, wanted, verdict.account):
        if charge.meter == verdict.refused:
            what = (
                f"{_words(charge.meter)}: limit {charge.limit}, used {level.used}, requested "
                f"{charge.amount}."
            )
    return ApiError(
        429,
        f"Rate limit reached for {of} on {what} Please try again in {duration(wait_ms)}.",
        kind="tokens" if "tokens" in verdict.refused else "requests",
        code="rate_limit_exceeded",
        retry_after_s=wait_ms / 1000,
        headers=[(b"retry-after-ms", b"%d" % wait_ms)],
    )


def _with_levels(
    verdict: Verdict, wanted: Sequence[AccountCharge], account: str
) -> list[tuple[Charge, Level]]:
    """Returns the charges of one account, with the levels of their meters."""
    charged = [(one.account, charge) for one in wanted for charge in one.charges]
    return [
        (charge, level)
        for (name, charge), level in zip(charged, verdict.levels, strict=True)
        if name == account
    ]


def too_large(found: TooLarge, of: str) -> ApiError:
    """Returns the 429 error of a request that its limit never admits; clients don't repeat it."""
    return ApiError(
        429,
        f"Request too large for {of} on {_words(found.meter)}: limit {found.limit}, requested "
        f"{found.amount}. The prompt or max_tokens must be reduced.",
        kind="tokens",
        code="rate_limit_exceeded",
        headers=[NO_RETRY],
    )


def _words(meter: str) -> str:
    return meter.replace("_", " ")
