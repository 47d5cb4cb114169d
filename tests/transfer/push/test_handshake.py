"""Backend allocation of Tetris section 4.2: order, reservation, no starvation; leases, fences."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.errors import IntegrityError
from millrace.core.incarnation import Incarnation
from millrace.core.kv.layout import KvLayout
from millrace.core.kv.transfer import HandshakeAsk, HandshakeRefused, Ticket
from millrace.transfer.push.handshake import Backends, Fences, Lease, refusal
from millrace.transfer.writer import GRACE_S

A, B, C = (Incarnation(f"prefill-{n}", 1) for n in range(3))
DECODE = Incarnation("decode-0", 3)
LAYOUT = KvLayout(
    model_hash="m",
    dtype="float32",
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
    page_tokens=1,
    head_start=0,
    head_count=1,
    num_pages=1,
)


def test_requests_are_sorted_by_the_first_handshake_timestamp():
    backends = Backends(1)
    backends.ask("late", A, 2.0)
    backends.ask("early", B, 1.0)
    assert backends.grant() == [("early", B, 0)]
    assert backends.grant() == []
    backends.done("early", B)
    backends.end("early")
    assert backends.grant() == [("late", A, 0)]


def test_a_backend_stays_with_its_request_until_all_chunks_are_transferred():
    backends = Backends(1)
    backends.ask("first", A, 1.0)
    backends.ask("second", C, 2.0)
    assert backends.grant() == [("first", A, 0)]
    backends.done("first", A)  # its first chunk is over, its second has not asked yet
    assert backends.grant() == []
    backends.ask("first", B, 3.0)
    assert backends.grant() == [("first", B, 0)]
    backends.done("first", B)
    backends.end("first")
    assert backends.grant() == [("second", C, 0)]


def test_a_later_request_never_takes_what_an_earlier_one_waits_for():
    backends = Backends(2)
    for sender in (A, B, C):
        backends.ask("first", sender, 1.0)
    backends.ask("second", A, 2.0)
    assert [g[0] for g in backends.grant()] == ["first", "first"]
    backends.ask("third", B, 0.5)  # an earlier timestamp goes before both
    backends.done("first", A)
    backends.end("first")
    assert [g[0] for g in backends.grant()] == ["third"]


def test_asking_again_keeps_the_place():
    backends = Backends(1)
    backends.ask("first", A, 1.0)
    backends.grant()
    backends.ask("second", B, 2.0)
    backends.withdraw("second", B)
    backends.ask("third", C, 3.0)
    backends.ask("second", B, 4.0)
    backends.done("first", A)
    backends.end("first")
    assert backends.grant() == [("second", B, 0)]


def test_a_buffer_still_written_to_is_not_handed_out():
    backends = Backends(1)
    backends.ask("first", A, 1.0)
    backends.grant()
    backends.end("first")
    backends.ask("second", B, 2.0)
    assert backends.grant() == [] and backends.free == 0
    backends.done("first", A)
    assert backends.grant() == [("second", B, 0)]


def test_a_request_that_was_planned_anew_does_not_hold_up_who_it_waits_for():
    """It has the earliest place again, and "later" has the only backend and another sender."""
    backends = Backends(1)
    backends.ask("early/1", A, 1.0)
    backends.grant()
    backends.end("early/1")
    backends.done("early/1", A)
    backends.ask("later", B, 2.0)
    assert backends.grant() == [("later", B, 0)]
    backends.ask("early/2", A, 1.0)
    backends.done("later", B)
    backends.ask("later", C, 3.0)
    assert backends.grant() == [("later", C, 0)]
    backends.end("later")
    backends.done("later", C)
    assert backends.grant() == [("early/2", A, 0)]


@dataclass
class Asked:
    """A request in `test_everybody_is_served`: one claim per attempt, all with one place in
    line.
    """

    senders: list[Incarnation]
    first_ask_s: float | None = None
    attempt: int = 0
    to_ask: list[Incarnation] = field(default_factory=list)
    served: set[Incarnation] = field(default_factory=set)

    def begin_attempt(self) -> None:
        self.attempt += 1
        self.to_ask, self.served = self.senders[:], set()


class Line:
    """Backends under any order of asks, ends and crashes; checked after each."""

    def __init__(self, rng: random.Random, count: int, requests: list[Asked], crashes: int) -> None:
        self.rng, self.count, self.crashes = rng, count, crashes
        self.backends = Backends(count)
        self.requests = {str(n): request for n, request in enumerate(requests)}
        self.waiting: set[tuple[str, Incarnation]] = set()
        self.busy: list[tuple[str, Incarnation]] = []
        self.idle: Counter[str] = Counter()
        self.now_s = 0.0
        for request in requests:
            request.begin_attempt()

    def of(self, claim: str) -> Asked | None:
        """Returns the request of a claim, if the claim is its current attempt."""
        name, attempt = claim.split("/")
        request = self.requests.get(name)
        return request if request and request.attempt == int(attempt) else None

    def step(self) -> None:
        self.now_s += 1
        asking = [name for name, request in self.requests.items() if request.to_ask]
        choice = self.rng.random()
        if asking and choice < 0.5:
            self.ask(self.rng.choice(asking))
        elif self.busy and choice < 0.9:
            self.end_one(*self.busy.pop(self.rng.randrange(len(self.busy))))
        elif self.crashes and self.requests:
            self.crashes -= 1
            self.fail(self.rng.choice(list(self.requests)))
        self.grant()

    def ask(self, name: str) -> None:
        request = self.requests[name]
        sender = request.to_ask.pop(self.rng.randrange(len(request.to_ask)))
        request.first_ask_s = request.first_ask_s or self.now_s
        claim = f"{name}/{request.attempt}"
        self.backends.ask(claim, sender, request.first_ask_s)
        if self.rng.random() < 0.2:  # its wait ends, and it asks again
            self.backends.withdraw(claim, sender)
            self.backends.ask(claim, sender, self.now_s)
        self.waiting.add((claim, sender))

    def end_one(self, claim: str, sender: Incarnation) -> None:
        self.backends.done(claim, sender)
        request = self.of(claim)
        if request is not None:
            request.served.add(sender)
            self.idle[claim] += 1
            if len(request.served) == len(request.senders):
                self.backends.end(claim)
                del self.idle[claim]
                del self.requests[claim.split("/")[0]]

    def fail(self, name: str) -> None:
        """The attempt is over. Its busy senders are quiet some time; none may wait on."""
        claim = f"{name}/{self.requests[name].attempt}"
        self.backends.end(claim)
        self.idle.pop(claim, None)
        self.waiting = {key for key in self.waiting if key[0] != claim}
        self.requests[name].begin_attempt()

    def grant(self) -> None:
        fresh = []
        for claim, sender, _ in self.backends.grant():
            request = self.of(claim)
            assert request is not None, "a claim that has ended got a backend"
            self.waiting.remove((claim, sender))
            self.busy.append((claim, sender))
            if self.idle[claim]:
                self.idle[claim] -= 1
            else:
                fresh.append(request.first_ask_s)
        asked = [r.first_ask_s for claim, _ in self.waiting if (r := self.of(claim))]
        # No earlier request still waits while a later request took a free backend.
        assert max(fresh, default=0) <= min(asked, default=self.now_s)
        assert not asked or self.backends.free == 0
        assert len(self.busy) + self.idle.total() + self.backends.free == self.count
        self.backends.check_integrity()


@settings(max_examples=200)
@given(
    st.integers(0, 2**32),
    st.integers(1, 4),
    st.lists(st.integers(1, 4), min_size=1, max_size=8),
    st.integers(0, 6),
)
def test_everybody_is_served(seed, count, senders, crashes):
    """In any order of asks, ends and crashes: earlier requests first, and all in the end."""
    requests = [Asked([Incarnation(f"s{n}", 1) for n in range(many)]) for many in senders]
    line = Line(random.Random(seed), count, requests, crashes)
    for _ in range(20_000):
        if not line.requests and not line.busy:
            break
        line.step()
    assert not line.requests and not line.waiting and line.backends.free == count


def test_a_lost_backend_is_found():
    backends = Backends(2)
    backends._free.append(0)
    with pytest.raises(IntegrityError, match="backends"):
        backends.check_integrity()


# -- leases


def lease() -> Lease:
    return Lease(
        number=1,
        request_id="r",
        attempt=1,
        sender=A,
        peer="p",
        layout=LAYOUT,
        backend=None,
        heard_s=10.0,
        renewed_s=12.0,
        sent_s=12.0,
    )


def test_silence_lapses_a_lease_and_is_no_proof_that_nothing_lands():
    held = lease()
    assert not held.lapsed(15.0, 5.0) and held.lapsed(15.1, 5.0)
    assert not held.quiet(1e9, 5.0)


def test_a_drained_lease_is_quiet_at_once_and_never_lapses():
    held = lease()
    held.drained = True
    assert held.quiet(0.0, 5.0) and not held.lapsed(1e9, 5.0)


def test_a_dead_sender_is_quiet_after_the_grace():
    held = lease()
    held.lose(13.0, dead=True)
    held.lose(14.0, dead=False)
    assert not held.quiet(13.0 + GRACE_S - 0.01, 5.0) and held.quiet(13.0 + GRACE_S, 5.0)


def test_an_unreachable_sender_is_quiet_once_its_right_to_write_has_run_out():
    held = lease()
    held.lose(13.0, dead=False)
    assert not held.quiet(17.0 + GRACE_S - 0.01, 5.0) and held.quiet(17.0 + GRACE_S, 5.0)


# -- fences


def ask(sender=A, receiver=DECODE) -> HandshakeAsk:
    return HandshakeAsk(
        ticket=Ticket(request_id="r", sender=sender, receiver=receiver),
        layout=LAYOUT,
        start_token=0,
        num_tokens=1,
        agent_metadata=b"",
    )


def test_fences():
    def why(asked, newest):
        return refusal(asked, receiver=DECODE, layout=LAYOUT, newest=newest)

    assert why(ask(), {}) == ""
    assert why(ask(), {A.id: 1}) == ""
    assert "prefill-0 (generation 1) was replaced by generation 2" in why(ask(), {A.id: 2})
    stale = why(ask(receiver=Incarnation("decode-0", 2)), {})
    assert "decode-0 (generation 2)" in stale and "decode-0 (generation 3)" in stale


def test_a_fence_lasts_while_the_later_incarnation_speaks():
    """A sender that starts after its wall clock was set back has the smaller generation."""
    fences = Fences(DECODE, LAYOUT, 5.0)
    later = A._replace(generation=9)
    fences.check(ask(later), 10.0)
    with pytest.raises(HandshakeRefused, match="stale sender"):
        fences.check(ask(), 15.0)
    fences.check(ask(later), 15.0)
    with pytest.raises(HandshakeRefused, match="stale sender"):
        fences.check(ask(), 20.0)
    fences.check(ask(), 20.1)
    fences.check(ask(), 20.2)
    fences.check(ask(later), 20.3)
    with pytest.raises(HandshakeRefused, match="stale sender"):
        fences.check(ask(), 20.4)
