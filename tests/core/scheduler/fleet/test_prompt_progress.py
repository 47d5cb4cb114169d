"""The progress of a prompt, and the time left until its first token."""

from __future__ import annotations

import pytest

from millrace.core.live_request import LiveRequest
from millrace.core.request import Chunk, RequestState
from millrace.core.scheduler.fleet.prompt_progress import PromptProgress, progress_of
from support.core_events import Bench, instance
from support.live_requests import live_request


def request(state: RequestState = RequestState.PREFILLING, **fields: object) -> LiveRequest:
    chunks = tuple(
        Chunk(index=i, start_token=100 * i, num_tokens=100, instance_ids=("p0",)) for i in range(4)
    )
    return live_request(
        **{
            "id": "r",
            "prompt_tokens": 400,
            "state": state,
            "chunks": chunks,
            "predicted_prefill_s": 8.0,
            "dispatched_s": 10.0,
            **fields,
        }
    )


@pytest.mark.parametrize(
    ("fields", "expected_s", "computed", "left_s"),
    [
        # Not placed: nothing is predicted.
        ({"state": RequestState.QUEUED, "chunks": ()}, None, 0, None),
        # It waits: the placement's prediction counts down, but never below its own prefill.
        ({"state": RequestState.QUEUED, "chunks": ()}, 40.0, 0, 28.0),
        ({"state": RequestState.QUEUED, "chunks": ()}, 13.0, 0, 8.0),
        # Computing: the plan's own seconds, without those of finished and of running work.
        ({}, 12.0, 0, 8.0),
        ({"running_since_s": 11.0}, 12.0, 0, 7.0),
        ({"chunks_done": 1, "executed_s": 2.0}, 12.0, 100, 6.0),
        # Slower than predicted: two seconds for a quarter leave six for the rest, and more later.
        ({"chunks_done": 1, "executed_s": 7.5}, 12.0, 100, 6.0),
        ({"chunks_done": 3, "executed_s": 8.0}, 12.0, 300, 2 / 3),
        # A later attempt begins after the tokens that decode keeps, at the pace of its own tokens.
        ({"kept_tokens": 100}, 12.0, 100, 8.0),
        ({"kept_tokens": 100, "chunks_done": 2, "executed_s": 8.0}, 12.0, 200, 4.0),
        # KV that decode has counts before its chunk is finished.
        ({"landed_tokens": 250, "chunks_done": 2, "executed_s": 8.0}, 12.0, 250, 1.2),
        # So do tokens of a chunk whose instance has reported a pass.
        ({"advanced_tokens": 250, "chunks_done": 2, "executed_s": 8.0}, 12.0, 250, 1.2),
        # All computed: only the placement's prediction is left.
        ({"state": RequestState.TRANSFERRING, "chunks_done": 4}, 12.5, 400, 0.5),
        ({"state": RequestState.TRANSFERRING, "chunks_done": 4}, 11.0, 400, 0.0),
        # Prefill has computed the first token, which has not come to the client.
        ({"state": RequestState.TRANSFERRING, "first_token_s": 11.0}, None, 400, None),
        # Its instance was lost then, and it waits again.
        ({"state": RequestState.QUEUED, "chunks": (), "first_token_s": 11.0}, None, 0, None),
    ],
)
def test_progress(fields, expected_s, computed, left_s):
    found = progress_of(request(**fields), 12.0, expected_s)
    state = fields.get("state", RequestState.PREFILLING)
    wanted_s = None if left_s is None else pytest.approx(left_s)
    assert found == PromptProgress(state=state, computed_tokens=computed, left_s=wanted_s)


def test_a_first_token_on_its_way_from_decode_is_one_in_transfer():
    found = progress_of(request(RequestState.DECODING, first_token_s=11.0), 12.0, None)
    assert found == PromptProgress(
        state=RequestState.TRANSFERRING, computed_tokens=400, left_s=None
    )


@pytest.mark.parametrize("state", [RequestState.FINISHED, RequestState.CANCELLED])
def test_a_request_that_is_over_has_none(state):
    assert progress_of(request(state), 12.0, 13.0) is None


def computed_of(bench: Bench, request_id: str) -> int:
    found = progress_of(bench.machine.requests[request_id], bench.now_s, None)
    assert found is not None
    return found.computed_tokens


@pytest.mark.parametrize(("pages", "leader"), [(30, "p0"), (1000, "p0"), (1000, "m0")])
def test_reports_of_passes_advance_a_prompt_that_is_spread_or_not(pages: int, leader: str) -> None:
    """A spread prompt has no prefix at decode that could be reported."""
    mixed = leader == "m0"
    fleet = (
        [instance("m0", pages=pages)]
        if mixed
        else [instance("p0", pages=1000), instance("d0", pages=pages), instance("k0", pages=1000)]
    )
    bench = Bench(*fleet)
    bench.submit("r", 800)
    request = bench.machine.requests["r"]
    assert bool(request.shards) == (pages == 30)
    bench.chunk_started(leader, "r")
    assert computed_of(bench, "r") == 0
    ignored = bench.machine.ignored
    for tokens in (200, 400, 300):  # the last is late
        bench.advanced(leader, "r", tokens)
    assert computed_of(bench, "r") == 400 and bench.machine.ignored == ignored
    bench.advanced(leader, "r", 600, attempt=2)  # of another attempt
    bench.advanced("k0" if not mixed else leader, "nobody", 600)
    if not mixed:
        bench.advanced("d0", "r", 600)  # it does not compute the prompt
        bench.advanced("k0", "r", 600)
    assert computed_of(bench, "r") == 400 and bench.machine.ignored > ignored
    bench.died(leader)
    if not mixed:
        assert computed_of(bench, "r") == 0  # the next attempt begins again
