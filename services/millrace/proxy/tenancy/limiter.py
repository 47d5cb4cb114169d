"""Holds requests to the limits of their tenant and key, and counts what tenants use.

A request of a caller with limits costs one round trip to the store before it is submitted, and one
after its answer, for which nobody waits. Other requests cost none.

If the store is out of reach, the proxy refuses requests of callers with limits (503): it cannot
know what other replicas have admitted. Such a proxy cannot record a request either, so no request
is lost by that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any

from millrace.core.limits.rules import Charge, Cost, TooLarge, charges, corrections
from millrace.proxy.errors import ApiError, unavailable
from millrace.proxy.metrics import TenantMetrics
from millrace.proxy.tenancy.caller import TENANT_ACCOUNT, Account, Caller
from millrace.proxy.tenancy.exchange import Admission, Exchange
from millrace.proxy.tenancy.rate_headers import limit_reached, rate_headers, too_large
from millrace.state.limits import AccountCharge, LimitStore, Verdict
from millrace.state.store import StoreError

log = logging.getLogger(__name__)

#: A request counts as open for this long after the last renewal: its proxy may have died.
LEASE_S = 30.0
RENEW_S = LEASE_S / 3
#: An error waits no longer than this for the headers that show the limits.
LOOK_S = 0.5
#: Time for the last corrections at shutdown.
CLOSE_S = 2.0


class Limiter:
    """Admits requests and settles them."""

    def __init__(self, store: LimitStore, metrics: TenantMetrics) -> None:
        self._store = store
        self._metrics = metrics
        self._open: dict[str, Admission] = {}
        self._renewing: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()

    async def admit(self, exchange: Exchange, cost: Cost) -> None:
        """Reserves `cost`, and notes what is left for the headers of the answer.

        Raises ApiError: 429 beyond a limit, 503 if the store is out of reach.
        """
        caller = exchange.caller
        if not caller.accounts:
            return
        wanted = [self._charged(exchange, account, cost) for account in caller.accounts]
        admission = Admission(lease=uuid.uuid4().hex, accounts=wanted)
        verdict = await self._ask(admission.lease, wanted)
        self._show(exchange, verdict)
        if not verdict.admitted:
            self._metrics.refused(caller.tenant, verdict.refused)
            raise limit_reached(verdict, wanted, _whose(caller, verdict.account))
        exchange.admission = admission
        self._keep(admission)

    def settle(self, exchange: Exchange, used: Cost) -> None:
        """Counts what a request used, and gives back what it reserved beyond that."""
        exchange.prompt_tokens, exchange.generated_tokens = (
            used.prompt_tokens,
            used.generated_tokens,
        )
        self._metrics.used(exchange.caller.tenant, used)
        admission, exchange.admission = exchange.admission, None
        if admission is not None:
            del self._open[admission.lease]
            self._spawn(self._settle(admission, used))

    def adopt(self, exchange: Exchange) -> None:
        """Holds what another replica had admitted, until `settle` or `hand_on`."""
        if exchange.admission is not None:
            self._keep(exchange.admission)
            self._spawn(self._renew_leases([exchange.admission]))

    def hand_on(self, exchange: Exchange) -> None:
        """Leaves the settling of a request to the replica that continues it."""
        admission, exchange.admission = exchange.admission, None
        if admission is not None:
            del self._open[admission.lease]

    async def look(self, exchange: Exchange) -> None:
        """Notes what is left for the headers of an answer to a request that was not admitted."""
        if exchange.shows_limits or not exchange.caller.accounts:
            return
        with contextlib.suppress(ApiError, TimeoutError):
            async with asyncio.timeout(LOOK_S):
                levels = await self.levels(exchange.caller, *exchange.caller.accounts)
            self._show(exchange, levels)

    async def levels(self, caller: Caller, *accounts: Account) -> Verdict:
        """Returns the levels of meters of some of the caller's accounts. Raises ApiError (503)."""
        return await self._ask("", [_nothing(caller, account) for account in accounts])

    async def close(self) -> None:
        """Writes the last corrections and closes the store."""
        if self._renewing is not None:
            self._renewing.cancel()
        if self._background:
            await asyncio.wait(self._background, timeout=CLOSE_S)
        await self._store.close()

    def _keep(self, admission: Admission) -> None:
        self._open[admission.lease] = admission
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew())

    def _charged(self, exchange: Exchange, account: Account, cost: Cost) -> AccountCharge:
        caller = exchange.caller
        found = charges(account.limits, cost)
        if isinstance(found, TooLarge):
            self._metrics.refused(caller.tenant, found.meter)
            raise too_large(found, _whose(caller, account.name))
        return _charge(caller, account, found)

    async def _ask(self, lease: str, accounts: Sequence[AccountCharge]) -> Verdict:
        try:
            return await self._store.admit(lease, round(LEASE_S * 1000), accounts)
        except StoreError as error:
            log.warning("limits: %s", error)
            raise unavailable("The store of limits does not answer.") from error

    def _show(self, exchange: Exchange, verdict: Verdict) -> None:
        exchange.headers += rate_headers(verdict.levels)
        exchange.shows_limits = True

    async def _settle(self, admission: Admission, used: Cost) -> None:
        corrected = [
            AccountCharge(
                group=one.group,
                account=one.account,
                concurrency=one.concurrency,
                charges=corrections(one.charges, used),
            )
            for one in admission.accounts
        ]
        await self._store.settle(admission.lease, corrected)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            if self._open:
                await _logged(self._renew_leases(list(self._open.values())))

    async def _renew_leases(self, admissions: Sequence[Admission]) -> None:
        leases = [
            (account.group, account.account, one.lease)
            for one in admissions
            for account in one.accounts
        ]
        await self._store.renew(leases, round(LEASE_S * 1000))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(_logged(work))
        self._background.add(task)
        task.add_done_callback(self._background.discard)


async def _logged(work: Coroutine[Any, Any, None]) -> None:
    """Logs a failure of the store: leases expire, and reservations stay charged."""
    try:
        await work
    except StoreError as error:
        log.warning("limits: %s", error)


def _charge(caller: Caller, account: Account, found: Sequence[Charge]) -> AccountCharge:
    return AccountCharge(
        group=caller.tenant,
        account=account.name,
        concurrency=account.limits.concurrency,
        charges=found,
    )


def _nothing(caller: Caller, account: Account) -> AccountCharge:
    """Returns charges of nothing at every meter of the account."""
    found = charges(account.limits, Cost(prompt_tokens=0, generated_tokens=0))
    assert not isinstance(found, TooLarge)  # nothing is never too large
    return _charge(caller, account, found)


def _whose(caller: Caller, account: str) -> str:
    whose = f"tenant {caller.tenant}"
    return whose if account == TENANT_ACCOUNT else f"key {caller.key} of {whose}"
