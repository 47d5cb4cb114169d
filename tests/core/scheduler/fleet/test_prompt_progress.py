"""The progress of a prompt, and the time left until its first token."""

from __future__ import annotations

import pytest

from millrace.core.live_request import LiveRequest
from millrace.core.request import Chunk, RequestState
from millrace.core.scheduler.fleet.prompt_progress import PromptProgress, progress_of
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
