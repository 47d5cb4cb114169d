"""The scheduler's decisions: events in, effects out (`machine`).

- `fleet`: the instances, their pools, and the queues of each pool.
- `request_table`: the requests that have not ended.
- `dispatch`: places requests, sends them, follows their progress, and recovers from losses.
- `planning`: which prefill instances compute which chunk.
- `outcomes`: refusals, objectives met or missed, and circuit breakers.
- `explanation`: why a request waits.

`docs/concepts/scheduler.md` follows one request through these modules.
"""
