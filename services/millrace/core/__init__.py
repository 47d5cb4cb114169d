"""Decisions of Millrace as pure code: no clock, no randomness, no I/O, standard library only.

Live services and the simulator run the same code. Read the modules in this order. For 2 to 4,
`docs/concepts/scheduler.md` follows one request through the files.

1. `request`: what a client asks for, the states of a request, chunks and shards.
   `live_request`: the same request with its progress.
2. `scheduler.events` and `scheduler.effects`: the inputs and the actions of the scheduler.
   `scheduler.machine`: one event in, effects out; its handlers get a `scheduler.step_context`.
3. `scheduler.request_table`, `scheduler.fleet.waiting_queue` and `scheduler.fleet.run_queue`: where
   a request waits, and which task runs. `scheduler.fleet.pool` and `scheduler.fleet.instances`: the
   instances of one model, and the pages that each request occupies there.
4. `scheduler.dispatch`: a scheduling round places requests at decode instances
   (`decode_placement`) and sends placed requests to prefill instances (`dispatcher`). The instances
   report how far they are (`chunk_progress`, `request_progress`).
5. `priority` (one module per policy) and `scheduler.planning` (one module per planner).
6. `instance`: what an instance decides itself. `preemption` and `gang`: which task runs, and how a
   group starts and stops together. `packing`: batches of prefill and decode.
7. `kv`: pages, layouts and shards. `cost`: predictions of time. `autoscale`: sizes of pools.
   `limits`: how much tenants may use. `report`: what became of requests. `config`: the settings of
   all processes.

Only `backoff` draws random numbers, for the pauses of live services between attempts; no decision
uses it. `scheduler.integrity` counts all sums of the scheduler again. `scheduler.recording` has the
format in which its steps are recorded.
"""
