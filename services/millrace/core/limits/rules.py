"""What a request costs its tenant and its key: meters, charges and refusals.

Limits per minute are token buckets. A bucket of L units gains L units a minute, continuously. A
full bucket allows a burst of L; within t seconds, never more than L (1 + t / 60) units pass. A
sliding window would hold every window of a minute to L, but it keeps an entry for every request of
the minute; windows that begin at whole minutes let 2 L pass around a boundary at once. A bucket is
two numbers, it knows when it will be full again (which `x-ratelimit-reset-*` of OpenAI's API says),
and a refused client that waits as told is admitted. A budget per day is a sum that begins again at
midnight UTC: that is what a budget means to its owner.

A request reserves tokens when it is admitted: its prompt, and all tokens that it may generate. At
its end the reservation is corrected by the tokens that it used. If a reservation is larger than a
bucket, a full bucket lends the rest: the correction at the end makes the request pay in full, so
that the rate over longer times stays exact. A budget per day lends nothing and is never exceeded.

Levels are whole numbers, of units times milliseconds, so that Python and Lua (whose numbers are
exact up to 2^53) agree to the last unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

MINUTE_MS = 60_000
DAY_MS = 86_400_000

#: The largest limit: 2^53 units times milliseconds, with room for a debt.
MOST_PER_MINUTE = 10**10
MOST_PER_DAY = 10**15


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a tenant or of a key; 0: no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    prompt_tokens_per_minute: int = 0
    generated_tokens_per_minute: int = 0
    tokens_per_day: int = 0
    concurrency: int = 0

    @property
    def any(self) -> bool:
        """Whether there is a limit at all."""
        return any(getattr(self, f.name) for f in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The tokens of a request: of its prompts, and generated or still to be generated."""

    prompt_tokens: int
    generated_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """What one meter is asked for. `limit` is its limit, in units per minute or per day."""

    meter: str
    limit: int
    amount: int

    @property
    def daily(self) -> bool:
        return self.meter == "tokens_per_day"


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLarge:
    """A request that its meter never admits: it asks for `amount` at once."""

    meter: str
    limit: int
    amount: int


def _amount(meter: str, cost: Cost) -> int:
    match meter:
        case "requests_per_minute":
            return 1
        case "prompt_tokens_per_minute":
            return cost.prompt_tokens
        case "generated_tokens_per_minute":
            return cost.generated_tokens
        case _:
            return cost.prompt_tokens + cost.generated_tokens


_METERS = tuple(f.name for f in fields(Limits) if f.name != "concurrency")


def charges(limits: Limits, cost: Cost) -> list[Charge] | TooLarge:
    """Returns what admission reserves at every meter of `limits`.

    A request is too large if its prompt exceeds a bucket, or if it may exceed the day's budget.
    """
    prompt_only = Cost(prompt_tokens=cost.prompt_tokens, generated_tokens=0)
    found = []
    for meter in _METERS:
        limit = getattr(limits, meter)
        if not limit:
            continue
        charge = Charge(meter=meter, limit=limit, amount=_amount(meter, cost))
        least = charge.amount if charge.daily else _amount(meter, prompt_only)
        if least > limit:
            return TooLarge(meter=meter, limit=limit, amount=least)
        if charge.amount > limit:
            charge = Charge(meter=meter, limit=limit, amount=limit)
        found.append(charge)
    return found


def corrections(reserved: Sequence[Charge], used: Cost) -> list[Charge]:
    """Returns the charges that turn reservations into `used`: negative amounts are given back.

    Requests are counted when they are admitted, and stay counted.
    """
    return [
        Charge(meter=c.meter, limit=c.limit, amount=_amount(c.meter, used) - c.amount)
        for c in reserved
        if c.meter != "requests_per_minute"
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """How full a meter is: `used` of `limit` units, rounded up; full again in `reset_ms`."""

    meter: str
    limit: int
    used: int
    reset_ms: int

    @property
    def left(self) -> int:
        """The units that are free; 0 while the meter has lent."""
        return max(0, self.limit - self.used)


@dataclass(slots=True, kw_only=True)
class Meter:
    """The state of one meter. `level` is in units times ms for a minute's, in units for a day's.

    `at` is the time of `level`: ms for a bucket, the number of the day for a budget.
    """

    level: int = 0
    at: int = 0

    def level_at(self, charge: Charge, now_ms: int) -> int:
        """Returns the level at `now_ms`, before the charge."""
        if charge.daily:
            return self.level if self.at == now_ms // DAY_MS else 0
        if self.at > now_ms + MINUTE_MS:  # the clock was set back: nobody waits until then
            return 0
        return max(0, self.level - max(0, now_ms - self.at) * charge.limit)

    def wait_ms(self, charge: Charge, now_ms: int) -> int:
        """Returns how long the charge must wait; 0: it fits now."""
        level = self.level_at(charge, now_ms)
        if charge.daily:
            return 0 if level + charge.amount <= charge.limit else DAY_MS - now_ms % DAY_MS
        over = level + (charge.amount - charge.limit) * MINUTE_MS
        return max(0, -(-over // charge.limit))

    def add(self, charge: Charge, now_ms: int) -> None:
        """Adds the charge, whether it fits or not."""
        unit = 1 if charge.daily else MINUTE_MS
        self.level = max(0, self.level_at(charge, now_ms) + charge.amount * unit)
        late = self.at if self.at <= now_ms + MINUTE_MS else now_ms
        self.at = now_ms // DAY_MS if charge.daily else max(late, now_ms)


def level_of(charge: Charge, level: int, now_ms: int) -> Level:
    """Returns how full a meter with this `level` at `now_ms` is, for answers."""
    if charge.daily:
        used, reset_ms = level, DAY_MS - now_ms % DAY_MS
    else:
        used, reset_ms = -(-level // MINUTE_MS), -(-level // charge.limit)
    return Level(meter=charge.meter, limit=charge.limit, used=used, reset_ms=reset_ms)
