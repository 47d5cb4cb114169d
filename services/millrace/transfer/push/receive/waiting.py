"""Queues handshakes that wait for the scheduler's admission or for a free backend."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from millrace.core.errors import IntegrityError, TransferError
from millrace.core.incarnation import Incarnation
from millrace.core.kv.transfer import HandshakeQueued, HandshakeRefused, Ticket
from millrace.transfer.push.handshake import Backends
from millrace.transfer.push.receive.admission import Admission, AdmissionState


class AdmissionTable:
    """The expected requests, by id. Deadlines are of the event loop's clock."""

    def __init__(self) -> None:
        self._admissions: dict[str, Admission] = {}
        self._waits: dict[str, list[asyncio.Future[None]]] = {}  # in order of arrival

    def __iter__(self) -> Iterator[Admission]:
        return iter(list(self._admissions.values()))

    def __len__(self) -> int:
        return len(self._admissions)

    def get(self, request_id: str) -> Admission | None:
        return self._admissions.get(request_id)

    def add(self, admission: Admission) -> None:
        """Adds an admission and wakes its waiting callers. Raises TransferError if the request
        exists.
        """
        if admission.request_id in self._admissions:
            raise TransferError(f"request {admission.request_id} is admitted already")
        self._admissions[admission.request_id] = admission
        self.wake(admission.request_id)

    def wake(self, request_id: str) -> None:
        """Wakes the callers that wait for the request."""
        for wait in self._waits.get(request_id, ()):
            if not wait.done():
                wait.set_result(None)

    def pop(self, request_id: str) -> Admission | None:
        return self._admissions.pop(request_id, None)

    async def wait_for(self, ticket: Ticket, deadline_s: float) -> Admission:
        """Returns the ticket's admission, which the scheduler's command may bring a moment later.

        Raises HandshakeRefused when the attempt is over or has failed, or did not come in time.
        """
        request_id, attempt = ticket.request_id, ticket.attempt
        while (admission := self._admissions.get(request_id)) is None or (
            admission.attempt < attempt
        ):
            wait = asyncio.get_running_loop().create_future()
            self._waits.setdefault(request_id, []).append(wait)
            try:
                async with asyncio.timeout_at(deadline_s):
                    await wait
            except TimeoutError:
                raise HandshakeRefused(
                    f"request {request_id} is not admitted here for attempt {attempt}"
                ) from None
            finally:
                self._waits[request_id].remove(wait)
                if not self._waits[request_id]:
                    del self._waits[request_id]
        if admission.attempt > attempt:
            raise HandshakeRefused(
                f"request {request_id}: attempt {attempt} is over; it is at {admission.attempt}"
            )
        if admission.state is AdmissionState.FAILED:
            raise HandshakeRefused(f"request {request_id} failed: {admission.failure}")
        return admission


class BackendQueue:
    """The asyncio side of `Backends`: senders wait here for their turn.

    A claim is one attempt of one admission: an id that is admitted again is a new claim.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._backends = Backends(count)
        self._waits: dict[tuple[str, Incarnation], asyncio.Future[int]] = {}

    async def acquire(
        self, claim: str, sender: Incarnation, first_ask_s: float, deadline_s: float
    ) -> int:
        """Waits for the request's turn and returns a backend. Raises HandshakeQueued at the
        deadline.
        """
        key = (claim, sender)
        if key in self._waits:
            raise HandshakeQueued(f"{claim}: {sender} waits for a backend already")
        wait = self._waits[key] = asyncio.get_running_loop().create_future()
        self._backends.ask(*key, first_ask_s)
        self._hand_out()
        try:
            async with asyncio.timeout_at(deadline_s):
                backend: int = await wait
                return backend
        except BaseException as error:
            self._backends.withdraw(*key)
            if wait.done() and not wait.cancelled():  # granted at the moment when its asker left
                self._backends.done(*key)
            if isinstance(error, TimeoutError):
                raise HandshakeQueued(f"{claim} waits for one of {self._count} backends") from None
            raise
        finally:
            del self._waits[key]
            self._hand_out()

    def done(self, claim: str, sender: Incarnation) -> None:
        """Frees a sender's buffer, which no write can reach any more."""
        self._backends.done(claim, sender)
        self._hand_out()

    def end(self, claim: str) -> None:
        """Ends a claim; its senders that still wait are refused."""
        self._backends.end(claim)
        for key, wait in self._waits.items():
            if key[0] == claim and not wait.done():
                wait.set_exception(HandshakeRefused(f"{claim} was given up"))
        self._hand_out()

    def check_integrity(self, *, idle: bool) -> None:
        """Raises IntegrityError when a backend is lost, or with `idle` when one is in use."""
        self._backends.check_integrity()
        if idle and (self._waits or self._backends.free != self._count):
            raise IntegrityError(
                f"no request is admitted, yet {self._count - self._backends.free} backends are "
                f"held and {len(self._waits)} senders wait"
            )

    def _hand_out(self) -> None:
        for claim, sender, backend in self._backends.grant():
            wait = self._waits.get((claim, sender))
            if wait is not None and not wait.done():
                wait.set_result(backend)
            else:
                self._backends.done(claim, sender)
