"""The longest suspension of a document while short urgent requests are too many."""

from __future__ import annotations

import math

from millrace.core.config import SchedulerConfig
from millrace.sim.workload.workload import SloClass
from support.simulation import Run, planned, prefill_s, toy_spec

CHAT = SloClass(name="chat", ttft_s=0.05)
DOCUMENT = SloClass(name="document", ttft_s=0.12)
CHAT_TOKENS, DOCUMENT_TOKENS = 500, 3000


def test_it_ends_before_the_overload_does() -> None:
    """A third more work comes than can be done, for as long as 200 documents take."""
    gap_s = 0.75 * prefill_s(CHAT_TOKENS)
    until_s = 200 * prefill_s(DOCUMENT_TOKENS)
    count = math.ceil(until_s / gap_s)
    requests = [planned(0, 0.0, DOCUMENT_TOKENS, slo=DOCUMENT)]
    requests += [planned(n, n * gap_s, CHAT_TOKENS, slo=CHAT) for n in range(1, count)]
    config = SchedulerConfig(max_queue_requests=10**6, max_queue_s=1e9, batch_tokens=0)
    run = Run(toy_spec(config), requests)
    document = run.records[0]
    assert document.ttft_s is not None and document.ttft_s < until_s
    assert 0.0 < document.longest_suspension_s < until_s
    chats_in_time = sum(r.ttft_s <= CHAT.ttft_s for n, r in run.records.items() if n)
    assert chats_in_time > 0.6 * count
