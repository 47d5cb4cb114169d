"""Holds requests back in the proxy until there is a fleet that can take them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from millrace.core.config import ProxyConfig
from millrace.proxy.errors import ApiError, overloaded, unavailable
from millrace.proxy.generation.proxy_request import ProxyRequest
from millrace.proxy.generation.stage import Stage

REPORT_INTERVAL_S = 1.0


class Parking:
    """Holds the parked requests, in the order in which they came."""

    def __init__(
        self, config: ProxyConfig, changed: Callable[[int], None], request_timeout_s: float
    ) -> None:
        """Calls `changed` with the number of parked requests whenever that changes.

        Where parking is off, a request still waits through an interruption, for at most
        `config.submit_timeout_s`: an instance or the scheduler died, and others take its place. A
        migrated request waits until `request_timeout_s` after its arrival: its client has some
        tokens already.
        """
        self._request_timeout_s = request_timeout_s
        self._is_on = config.park_timeout_s > 0
        self._timeout_s = config.park_timeout_s or config.submit_timeout_s
        self._most = config.max_parked
        self._changed = changed
        self._parked: dict[int, ProxyRequest] = {}  # by identity
        self.fleet_ready = False  # whether instances take requests, by the scheduler's last report
        self._interrupted_at: float | None = None  # since when a fleet that was ready is not

    def __len__(self) -> int:
        return len(self._parked)

    def note_fleet(self, now: float, *, ready: bool) -> None:
        """Notes what the scheduler reports of the fleet."""
        if ready:
            self._interrupted_at = None
        elif self.fleet_ready:
            self._interrupted_at = now
        self.fleet_ready = ready

    def is_open(self, now: float) -> bool:
        """Whether new requests may wait here: parking is on, or the fleet is interrupted."""
        since = self._interrupted_at
        return self._is_on or (since is not None and now - since < self._timeout_s)

    def takes(self, request: ProxyRequest, now: float) -> bool:
        """Whether the request may wait here: a migrated request always may."""
        return request.moves > 0 or self.is_open(now)

    def check_room(self, requests: int) -> None:
        """Raises ApiError (429) when there is no room for `requests` more."""
        if len(self._parked) + requests > self._most:
            raise overloaded(
                f"{len(self._parked)} requests wait for instances to start; the limit is "
                f"{self._most}."
            )

    def add(self, request: ProxyRequest, now: float) -> None:
        """Parks a request. Raises ApiError (429) without room; a migrated request needs none."""
        if not request.moves:
            self.check_room(1)
        request.park(now)
        self._parked[id(request)] = request
        self._changed(len(self._parked))

    def discard(self, request: ProxyRequest) -> None:
        if self._parked.pop(id(request), None) is not None:
            self._changed(len(self._parked))

    def take_all(self) -> list[ProxyRequest]:
        """Returns all parked requests and forgets them."""
        taken = list(self._parked.values())
        if taken:
            self._parked.clear()
            self._changed(0)
        return taken

    def takes_refused(self, request: ProxyRequest, code: str, now: float) -> bool:
        """Whether a request that the scheduler refused may wait to be submitted again.

        A migrated request was admitted once, so there was room for it, and it may wait until there
        is room again.
        """
        if request.moves:
            return code in ("unavailable", "overloaded", "too_large")
        # A fleet that is ready by its last report has changed: the next report is on its way.
        return code == "unavailable" and (self.is_open(now) or self.fleet_ready)

    def shut(self) -> list[ProxyRequest]:
        """Takes no more new requests. Returns those parked here, which the caller ends."""
        self._is_on, self._timeout_s = False, 0.0
        return [request for request in self._parked.values() if not request.moves]

    def expiry(self, request: ProxyRequest, now: float) -> ApiError | None:
        """Returns the error (503) that ends a request's wait, if the wait was too long."""
        limit_s, since = self._timeout_s, request.parked_since
        if request.moves:
            limit_s, since = self._request_timeout_s, request.arrived_at
        if request.stage is not Stage.PARKED or since is None or now - since <= limit_s:
            return None
        return unavailable(f"No instances were ready within {limit_s:g} s.")


class LoadReport:
    """Reports how many requests are parked whenever that changes, once a second at most."""

    def __init__(self, send: Callable[[int], None]) -> None:
        self._send = send
        self._parked = 0
        self._pause: asyncio.TimerHandle | None = None  # set while no report may be sent
        self._pending = False

    def set(self, parked: int) -> None:
        self._parked = parked
        if self._pause is None:
            self._tell()
        else:
            self._pending = True

    def repeat(self) -> None:
        """Reports again, to a scheduler that has not heard of the parked requests."""
        if self._parked:
            self.set(self._parked)

    def close(self) -> None:
        if self._pause is not None:
            self._pause.cancel()

    def _tell(self) -> None:
        self._send(self._parked)
        self._pending = False
        loop = asyncio.get_running_loop()
        self._pause = loop.call_later(REPORT_INTERVAL_S, self._resume)

    def _resume(self) -> None:
        self._pause = None
        if self._pending:
            self._tell()
