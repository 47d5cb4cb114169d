"""The progress of a prompt, and the expected time of its first token.

Not from a paper. The time left is the largest of three predictions, since each leaves something
out. The plan's own seconds (`LiveRequest.remaining_s`) leave out the work ahead. The prediction at
the placement leaves out the work that came later. The pace so far is of earlier, cheaper tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.core.live_request import LiveRequest
from millrace.core.request import RequestState

_COMPUTED = frozenset({RequestState.TRANSFERRING, RequestState.DECODING})


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptProgress:
    """Tokens computed, and seconds left (`left_s`); None if nothing predicts the first token.

    `state`: queued, prefilling or transferring. `queue_place` is 1 for the request that is computed
    next; None for a request in no queue.
    """

    state: RequestState
    computed_tokens: int
    left_s: float | None
    queue_place: int | None = None


def progress_of(
    request: LiveRequest,
    now_s: float,
    expected_s: float | None,
    queue_place: int | None = None,
) -> PromptProgress | None:
    """Returns the progress of a request; None after its end.

    Who asks has no token of it: the first token of one that decodes is still on its way.
    `expected_s`: predicted time of the first token, as of the placement; None: not placed, or over.
    `queue_place`: as in the result.
    """
    if request.state.is_final:
        return None
    state = RequestState.TRANSFERRING if request.state in _COMPUTED else request.state
    computed = computed_tokens(request)
    left_s = None
    if expected_s is not None:
        left_s = max(0.0, expected_s - now_s, _by_plan_s(request, now_s))
        left_s = max(left_s, _at_its_pace_s(request, now_s, computed))
    return PromptProgress(
        state=state, computed_tokens=computed, left_s=left_s, queue_place=queue_place
    )


def computed_tokens(request: LiveRequest) -> int:
    """The first tokens of the prompt that are computed, by the reports of chunks and passes, or
    whose KV is at decode.
    """
    if request.state in _COMPUTED:
        return request.prompt_tokens
    done = request.kept_tokens
    if request.chunks_done:
        last = request.chunks[request.chunks_done - 1]
        done = last.start_token + last.num_tokens
    return max(done, request.landed_tokens, request.advanced_tokens)


def _by_plan_s(request: LiveRequest, now_s: float) -> float:
    if request.state in _COMPUTED:
        return 0.0
    return request.remaining_s(now_s)


def _at_its_pace_s(request: LiveRequest, now_s: float, computed: int) -> float:
    """Returns the seconds of the rest at the pace of the tokens that this attempt has computed."""
    ours = computed - request.kept_tokens
    if request.state is not RequestState.PREFILLING or request.dispatched_s is None or ours <= 0:
        return 0.0
    return (now_s - request.dispatched_s) * (request.prompt_tokens - computed) / ours
