"""Counts requests and tokens in Redis, shared by all replicas of the proxy.

Every call is one script: Redis runs scripts one at a time, so no two replicas ever take the same
free place. Times are those of the server's clock. The scripts have the arithmetic of
`core.limits.rules.Meter`; `tests/contract/test_limit_store.py` compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from millrace.core.config import StoreConfig
from millrace.core.limits.rules import DAY_MS, MINUTE_MS, Charge, level_of
from millrace.state.limits import AccountCharge, Verdict
from millrace.state.redis.keys import key_of
from millrace.state.redis.link import RedisLink
from millrace.state.redis.scripts import NOW_MS, Script, ScriptCall

#: Life of an account that nobody uses: longer than a day's budget, and than any debt of a bucket.
_IDLE_MS = 2 * DAY_MS

# KEYS: by account, a hash of meters (`NAME`: level, `NAME@`: its time) and a sorted set of leases.
# ARGV: lease, its ms, the time in ms or '' for the server's, by account: concurrency, number of
# charges, and by charge: meter, limit, amount, 1 if daily.
_PRELUDE = f"""{NOW_MS}
local lease, lease_ms, now = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]) or now_ms()
local day, midnight = math.floor(now / {DAY_MS}), {DAY_MS} - now % {DAY_MS}
local accounts, position = {{}}, 4
for i = 1, #KEYS, 2 do
  local account = {{hash = KEYS[i], leases = KEYS[i + 1], charges = {{}}}}
  account.concurrency = tonumber(ARGV[position])
  local count = tonumber(ARGV[position + 1])
  position = position + 2
  for c = 1, count do
    account.charges[c] = {{meter = ARGV[position], limit = tonumber(ARGV[position + 1]),
      amount = tonumber(ARGV[position + 2]), daily = ARGV[position + 3] == '1'}}
    position = position + 4
  end
  accounts[#accounts + 1] = account
end
local function read(account)
  for _, charge in ipairs(account.charges) do
    local found = redis.call('HMGET', account.hash, charge.meter, charge.meter .. '@')
    local level, at = tonumber(found[1] or 0), tonumber(found[2] or 0)
    charge.at = at
    if charge.daily then
      charge.level = at == day and level or 0
    elseif at > now + {MINUTE_MS} then
      charge.level, charge.at = 0, now
    else
      charge.level = math.max(0, level - math.max(0, now - at) * charge.limit)
    end
  end
end
local function add(account)
  for _, charge in ipairs(account.charges) do
    local unit, at = {MINUTE_MS}, math.max(charge.at, now)
    if charge.daily then unit, at = 1, day end
    charge.level = math.max(0, charge.level + charge.amount * unit)
    redis.call('HSET', account.hash, charge.meter, string.format('%.0f', charge.level),
      charge.meter .. '@', string.format('%.0f', at))
  end
  redis.call('PEXPIRE', account.hash, {_IDLE_MS})
end
"""

# Returns: index of the account that refuses (0: admitted), index of the charge (0: concurrency), ms
# to wait, the time, and the level of every meter.
_ADMIT = Script(
    _PRELUDE
    + f"""
local refusing, refused, wait, known = 0, 0, -1, false
for i, account in ipairs(accounts) do
  redis.call('ZREMRANGEBYSCORE', account.leases, '-inf', now)
  if lease ~= '' then  -- a lease that is longer is from before the clock was set back
    local most = now + lease_ms
    for _, one in ipairs(redis.call('ZRANGEBYSCORE', account.leases, '(' .. most, '+inf')) do
      redis.call('ZADD', account.leases, most, one)
    end
  end
  read(account)
  if redis.call('ZSCORE', account.leases, lease) then known = true end
  if account.concurrency > 0 and redis.call('ZCARD', account.leases) >= account.concurrency then
    if wait < 0 then refusing, refused, wait = i, 0, 0 end
  end
  for c, charge in ipairs(account.charges) do
    local needed = 0
    if charge.daily then
      if charge.level + charge.amount > charge.limit then needed = midnight end
    else
      local over = charge.level + (charge.amount - charge.limit) * {MINUTE_MS}
      needed = math.max(0, math.ceil(over / charge.limit))
    end
    if needed > 0 and needed > wait then refusing, refused, wait = i, c, needed end
  end
end
local charged = lease ~= '' and not known
if not charged then refusing = 0 end
if charged and refusing == 0 then
  for _, account in ipairs(accounts) do
    redis.call('ZADD', account.leases, now + lease_ms, lease)
    redis.call('PEXPIRE', account.leases, lease_ms)
    add(account)
  end
end
local answer = {{refusing, refused, math.max(0, wait), now}}
for _, account in ipairs(accounts) do
  for _, charge in ipairs(account.charges) do answer[#answer + 1] = charge.level end
end
return answer
"""
)
_SETTLE = Script(
    _PRELUDE
    + """
for _, account in ipairs(accounts) do
  if redis.call('ZREM', account.leases, lease) == 1 then
    read(account)
    add(account)
  end
end
return 1
"""
)
# KEYS: a sorted set. ARGV: ms of the leases, the time in ms or '', the leases.
_RENEW = Script(
    NOW_MS
    + """
local lease_ms, now = tonumber(ARGV[1]), tonumber(ARGV[2]) or now_ms()
for i = 3, #ARGV do redis.call('ZADD', KEYS[1], now + lease_ms, ARGV[i]) end
redis.call('PEXPIRE', KEYS[1], lease_ms)
return 1
"""
)


class RedisLimits:
    """A LimitStore over Redis."""

    def __init__(self, config: StoreConfig, *, clock: Callable[[], float] | None = None) -> None:
        """Connects at the first call. `clock` returns Unix seconds; None: the server's clock.

        Raises ConfigError when `config.url` is not valid.
        """
        self._link = RedisLink(config)
        self._prefix = config.key_prefix
        self._clock = clock

    async def admit(self, lease: str, lease_ms: int, accounts: Sequence[AccountCharge]) -> Verdict:
        call = self._call(_ADMIT, lease, lease_ms, accounts)
        return _verdict(await self._link.run(call), accounts)

    async def settle(self, lease: str, accounts: Sequence[AccountCharge]) -> None:
        call = self._call(_SETTLE, lease, 0, accounts)
        await self._link.run(call)

    async def renew(self, leases: Sequence[tuple[str, str, str]], lease_ms: int) -> None:
        calls = [
            ScriptCall(
                _RENEW, self._keys(*of)[1:], (lease_ms, self._now(), *(one[2] for one in found))
            )
            for of, found in groupby(sorted(leases), key=lambda one: one[:2])
        ]
        await self._link.run_all(calls)

    async def close(self) -> None:
        await self._link.close()

    def _now(self) -> str | int:
        return "" if self._clock is None else int(self._clock() * 1000)

    def _call(
        self, script: Script, lease: str, lease_ms: int, accounts: Sequence[AccountCharge]
    ) -> ScriptCall:
        keys = [key for one in accounts for key in self._keys(one.group, one.account)]
        arguments: list[bytes | str | int] = [lease, lease_ms, self._now()]
        for one in accounts:
            arguments += [one.concurrency, len(one.charges)]
            for charge in one.charges:
                arguments += [charge.meter, charge.limit, charge.amount, int(charge.daily)]
        return ScriptCall(script, keys, arguments)

    def _keys(self, group: str, account: str) -> tuple[bytes, bytes]:
        """Returns the keys of the meters and of the leases: all of a tenant in one hash slot."""
        stem = key_of(self._prefix, "limits", f"{{{group}}}", account)
        return stem, stem + b":open"


def _verdict(answer: list[Any], accounts: Sequence[AccountCharge]) -> Verdict:
    refusing, refused, wait_ms, now_ms, *raw = answer
    levels = tuple(
        level_of(charge, level, now_ms)
        for charge, level in zip(_all_charges(accounts), raw, strict=True)
    )
    if not refusing:
        return Verdict(levels=levels)
    by = accounts[refusing - 1]
    meter = by.charges[refused - 1].meter if refused else "concurrency"
    return Verdict(refused=meter, account=by.account, wait_ms=wait_ms, levels=levels)


def _all_charges(accounts: Sequence[AccountCharge]) -> Iterator[Charge]:
    return (charge for one in accounts for charge in one.charges)
