"""SLO-aware batching: FlowPrefill section 5.2, Algorithm 1.

When the request H at the head of the order is about to start, waiting requests join it, in order of
priority, as long as H is in time nonetheless:

    admit r  if  n = N + r.num_tokens < G  and  T_remain > L = predict(n)

with N the batch's tokens so far, G the token budget and T_remain H's time until its deadline. A
batch then runs, is suspended and finishes as one, so each member's first token comes after L.

Added to the algorithm:

- Urgency, as in the public code of the paper: a tenth of H's SLO (deadline less arrival) stays in
  reserve. The search ends at the first request that would leave H less; without it every batch
  would be filled until the least error of the prediction costs H its deadline.
- The other deadlines. The algorithm checks H's alone, which suffices under S-EDF, where H has the
  earliest deadline that can be met. Under other policies H may not have it, so a request joins only
  if the batch also ends before its own deadline and before those of the members so far. A request
  whose deadline can't be met any more has nothing to lose: it joins on H's terms. A request that
  could be in time, but not in this batch, is passed over and may head the next batch.
- Candidates are waiting requests only. The algorithm's C also contains the running task E, which
  has its own execution state and can't be merged into another batch.

L is that of one prompt of n tokens. Attention among separate prompts costs less, so the prediction
errs on the side of H.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from millrace.core.cost.latency import Latency
from millrace.core.live_request import LiveRequest
from millrace.core.priority.slack import slack_s

#: G of the paper, for an A100: more tokens never fill a device.
MOST_FILLING_TOKENS = 2048
#: A token of a batch that fills the device costs at most this many times its least cost.
FILLED = 1.1

#: Share of the head's SLO that must be left when the batch is done (FlowPrefill's public code).
RESERVE = 0.1


def filling_tokens(latency: Latency) -> int:
    """Returns G: the fewest tokens that fill the device, beyond which no token becomes cheaper.

    The paper gives 2048 for an A100; elsewhere G is read off the latency model, and 2048 at most.
    """
    counts = [1 << power for power in range(MOST_FILLING_TOKENS.bit_length())]
    each_s = [latency.chunk_s(tokens) / tokens for tokens in counts]
    least_s = min(each_s)
    return next(t for t, s in zip(counts, each_s, strict=True) if s <= FILLED * least_s)


def batch(
    head: LiveRequest,
    candidates: Iterable[LiveRequest],
    budget_tokens: int,
    now_s: float,
    predict: Callable[[int], float],
) -> list[LiveRequest]:
    """Returns `head` and those of `candidates` that join it, in the order given.

    `candidates` are waiting requests in order of priority, none of them `head`. A batch stays under
    `budget_tokens` (G) tokens; a budget of 0 leaves every request alone. `predict(n)` gives the
    seconds of a prefill of n tokens and must not fall as n grows.
    """
    members = [head]
    tokens = head.prompt_tokens
    latest_s = head.deadline_s  # when the batch must be done for every member that can be in time
    reserve_s = RESERVE * (head.deadline_s - head.arrival_s)
    for request in candidates:
        if tokens + 1 >= budget_tokens:
            break
        total = tokens + request.prompt_tokens
        if total >= budget_tokens:
            continue
        end_s = now_s + predict(total)
        if head.deadline_s - end_s < reserve_s or end_s >= head.deadline_s:
            break
        own_s = request.deadline_s if slack_s(request, now_s) > 0.0 else latest_s
        if end_s >= min(latest_s, own_s):
            continue
        members.append(request)
        tokens = total
        latest_s = min(latest_s, own_s)
    return members
