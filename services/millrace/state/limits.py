"""Counts the requests and tokens of tenants and keys, for all replicas of the proxy.

An account is a tenant's or a key's set of meters. A request is charged to all of its accounts in
one step or to none. While the request runs it holds a lease in each account. The lease is its place
among the account's open requests, and the proof that a repeated call is a repetition. A replica
renews the leases of its requests. If the replica dies, its leases expire, and its requests no
longer count as open. Their reservations stay charged, since nobody knows what they used: buckets
refill within minutes, a day's budget at midnight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from millrace.core.limits.rules import Charge, Level, Meter, level_of


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountCharge:
    """The charges of one request to one account; `concurrency` 0: no limit of open requests.

    `group` is the tenant's name: all accounts of a call have the same.
    """

    group: str
    account: str
    concurrency: int
    charges: Sequence[Charge]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a request is admitted, and the levels of all meters after that, by account.

    `refused` names the meter that makes it wait longest, `account` its account; the meter is
    `concurrency` if too many requests are open, whose wait nobody knows (`wait_ms` is 0).
    """

    refused: str = ""
    account: str = ""
    wait_ms: int = 0
    levels: Sequence[Level]

    @property
    def admitted(self) -> bool:
        return not self.refused


class LimitStore(Protocol):
    """Accounts by name. Every method raises StoreError when the store can't be reached."""

    async def admit(self, lease: str, lease_ms: int, accounts: Sequence[AccountCharge]) -> Verdict:
        """Charges all accounts, or none of them. A repetition of an admitted call changes nothing.

        With an empty `lease` nothing is charged: the levels are shown.
        """

    async def settle(self, lease: str, accounts: Sequence[AccountCharge]) -> None:
        """Applies corrections and ends the lease; does nothing to a lease that has ended."""

    async def renew(self, leases: Sequence[tuple[str, str, str]], lease_ms: int) -> None:
        """Renews leases, given as (group, account, lease), for `lease_ms`."""

    async def close(self) -> None:
        """Closes the store's connections."""


@dataclass(slots=True, eq=False)
class _Account:
    meters: dict[str, Meter] = field(default_factory=dict)
    leases: dict[str, int] = field(default_factory=dict)  # until when, ms

    def meter(self, charge: Charge) -> Meter:
        return self.meters.setdefault(charge.meter, Meter())


class MemoryLimits:
    """A LimitStore in a dictionary. `clock` returns Unix time in seconds."""

    def __init__(self, *, clock: Callable[[], float] = lambda: time.time_ns() / 1e9) -> None:
        self._clock = clock
        self._accounts: dict[tuple[str, str], _Account] = {}

    async def admit(self, lease: str, lease_ms: int, accounts: Sequence[AccountCharge]) -> Verdict:
        now_ms = self._now_ms()
        waits = []
        known = False
        for wanted in accounts:
            account = self._account(wanted)
            account.leases = {k: v for k, v in account.leases.items() if v > now_ms}
            if lease:  # a lease that is longer is from before the clock was set back
                most = now_ms + lease_ms
                account.leases = {k: min(v, most) for k, v in account.leases.items()}
            known |= lease in account.leases
            if 0 < wanted.concurrency <= len(account.leases):
                waits.append((0, "concurrency", wanted.account))
            for charge in wanted.charges:
                wait_ms = account.meter(charge).wait_ms(charge, now_ms)
                if wait_ms:
                    waits.append((wait_ms, charge.meter, wanted.account))
        charged = bool(lease) and not known
        if charged and waits:
            wait_ms, refused, name = max(waits, key=lambda wait: wait[0])
            return Verdict(
                refused=refused,
                account=name,
                wait_ms=wait_ms,
                levels=self._levels(accounts, now_ms),
            )
        if charged:
            for wanted in accounts:
                account = self._account(wanted)
                account.leases[lease] = now_ms + lease_ms
                for charge in wanted.charges:
                    account.meter(charge).add(charge, now_ms)
        return Verdict(levels=self._levels(accounts, now_ms))

    async def settle(self, lease: str, accounts: Sequence[AccountCharge]) -> None:
        now_ms = self._now_ms()
        for wanted in accounts:
            account = self._account(wanted)
            if account.leases.pop(lease, None) is None:
                continue
            for charge in wanted.charges:
                account.meter(charge).add(charge, now_ms)

    async def renew(self, leases: Sequence[tuple[str, str, str]], lease_ms: int) -> None:
        until_ms = self._now_ms() + lease_ms
        for group, account, lease in leases:
            self._accounts.setdefault((group, account), _Account()).leases[lease] = until_ms

    async def close(self) -> None:
        self._accounts.clear()

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

    def _account(self, wanted: AccountCharge) -> _Account:
        return self._accounts.setdefault((wanted.group, wanted.account), _Account())

    def _levels(self, accounts: Sequence[AccountCharge], now_ms: int) -> tuple[Level, ...]:
        return tuple(
            level_of(charge, self._account(wanted).meter(charge).level_at(charge, now_ms), now_ms)
            for wanted in accounts
            for charge in wanted.charges
        )
