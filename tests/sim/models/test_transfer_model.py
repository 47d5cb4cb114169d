"""Backends and landing times: Tetris section 4.2."""

from __future__ import annotations

import pytest

from millrace.core.request import Chunk, Request
from millrace.sim.cluster.clock import Clock
from millrace.sim.cluster.job import Attempt, Job
from millrace.sim.models.decode_model import DecodeInstance
from millrace.sim.models.transfer_model import Transfers
from millrace.sim.results.counters import Tally
from support.simulation import planned, toy_spec


class Site:
    """A decode instance and the landed requests. A token is 4000 bytes, a link 1e9 bytes/s."""

    def __init__(self, backends: int = 1, handshake_s: float = 0.0) -> None:
        self.clock, self.tally = Clock(), Tally()
        self.landed: dict[str, float] = {}
        spec = toy_spec(backends=backends, handshake_s=handshake_s)
        self.transfers = Transfers(spec, self.clock, self.tally, self._land)
        self.decode = DecodeInstance("d0", 1, backends)

    def _land(self, attempt: Attempt) -> None:
        self.landed[attempt.job.id] = self.clock.now_s

    def attempt(self, name: str, *sizes: tuple[int, int]) -> Attempt:
        """Makes an attempt with chunks of (tokens, group)."""
        chunks, start = [], 0
        for index, (tokens, sp) in enumerate(sizes):
            ids = tuple(f"p{i}" for i in range(sp))
            chunks.append(
                Chunk(index=index, start_token=start, num_tokens=tokens, instance_ids=ids)
            )
            start += tokens
        request = Request(id=name, proxy_id="x", prompt_tokens=start, max_new_tokens=2)
        return Attempt(Job(planned(0, 0.0, start, 2), request, 0.0), tuple(chunks), self.decode, 1)

    def at(self, time_s: float) -> None:
        """Runs all callbacks up to that time."""
        self.clock.at(time_s, lambda _: None)
        while self.clock.next_s is not None and self.clock.next_s <= time_s:
            self.clock.run_next()

    def compute(self, attempt: Attempt, start_s: float, end_s: float) -> None:
        """Computes all its chunks, each from the end of the chunk before, evenly."""
        self.at(start_s)
        self.transfers.begin(attempt)
        length_s = (end_s - start_s) / len(attempt.chunks)
        for index, chunk in enumerate(attempt.chunks):
            begun_s = start_s + index * length_s
            self.at(begun_s + length_s)
            self.transfers.chunk_computed(attempt, chunk, begun_s, chunk.num_tokens)
        self.transfers.finish(attempt)


def test_behind_slow_compute_only_the_last_layer_is_left():
    site = Site()
    site.compute(site.attempt("a", (1000, 1)), 0.0, 1.0)
    site.at(2.0)
    assert site.landed["a"] == pytest.approx(1.0 + 1000 * 1000 / 1e9)
    assert site.tally.transfer_tail_s == pytest.approx(1e-3)


def test_compute_that_outruns_the_link_leaves_the_rest():
    site = Site()
    site.compute(site.attempt("a", (1_000_000, 1)), 0.0, 1.0)
    site.at(9.0)
    assert site.landed["a"] == pytest.approx(4.0)  # 4e9 bytes from 0 on


def test_members_send_side_by_side():
    site = Site()
    site.compute(site.attempt("a", (1_000_000, 4)), 0.0, 0.5)
    site.at(9.0)
    assert site.landed["a"] == pytest.approx(1.0)


def test_the_handshake_hides_behind_compute():
    site = Site(handshake_s=0.1)
    site.compute(site.attempt("a", (1000, 1)), 0.0, 1.0)
    site.at(2.0)
    assert site.landed["a"] == pytest.approx(1.001)
    assert site.tally.handshake_s == 0.0


def test_a_handshake_longer_than_compute_shows():
    site = Site(handshake_s=0.1)
    site.compute(site.attempt("a", (1000, 1)), 0.0, 0.02)
    site.at(2.0)
    assert site.landed["a"] == pytest.approx(0.1 + 4e-3)
    assert site.tally.handshake_s == pytest.approx(0.08)


def test_backends_go_in_order_of_the_first_handshake_and_are_kept_to_the_end():
    site = Site(backends=1)
    a, b, c = (site.attempt(name, (250_000, 1)) for name in "abc")  # 1e9 bytes each
    site.at(0.0)
    for each in (a, b, c):
        site.transfers.begin(each)
    site.at(0.5)
    for each in (c, b, a):  # computed in the other order
        site.transfers.chunk_computed(each, each.chunks[0], 0.0, 250_000)
        site.transfers.finish(each)
    site.at(9.0)
    assert site.landed == pytest.approx({"a": 1.0, "b": 2.0, "c": 3.0})
    assert list(site.landed) == ["a", "b", "c"]
    assert site.tally.transfer_wait_s == pytest.approx(0.5 + 1.5)
    assert (site.decode.backends.free, len(site.decode.backends.leased)) == (1, 0)


def test_a_cancelled_request_gives_its_backend_or_its_turn_back():
    site = Site(backends=1)
    a, b, c = (site.attempt(name, (250_000, 1)) for name in "abc")
    for each in (a, b, c):
        site.transfers.begin(each)
    b.closed = True
    site.transfers.release(b)
    site.at(0.5)
    a.closed = True
    site.transfers.release(a)
    site.transfers.chunk_computed(c, c.chunks[0], 0.0, 250_000)
    site.transfers.finish(c)
    site.at(9.0)
    assert site.landed == pytest.approx({"c": 1.5})
    assert site.decode.backends.free == 1
