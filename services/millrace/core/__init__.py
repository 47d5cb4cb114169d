"""Decisions of Millrace as pure code: no clock, no randomness, no I/O, standard library only.

Live services and the simulator run the same code. A newcomer reads in this order.

1. `request`: what a client asks for, the states of a request, chunks and shards.
   `live_request`: the same request with its progress.
2. `scheduler.events` and `scheduler.effects`: the inputs and the actions of the scheduler.
   `scheduler.machine`: one event in, effects out; its handlers get a `scheduler.step_context`.
3. `scheduler.request_table`, `scheduler.fleet.waiting_queue` and `scheduler.fleet.run_queue`: where
   a request waits, and which task runs. `scheduler.fleet.pool` and `scheduler.fleet.instances`: the
   instances of one model, and what each holds.
4. `scheduler.dispatch`: a scheduling round. Requests are placed at decode instances
   (`decode_placement`), and placed ones are sent to prefill instances (`dispatcher`). Reports of
   the instances come back (`chunk_progress`, `request_progress`).
5. `priority` (one module per policy) and `scheduler.planning` (one module per planner).
6. `instance`: what an instance decides itself. `preemption` and `gang`: which task runs, and how a
   group starts and stops together. `packing`: batches of prefill and decode.
7. `kv`: pages, layouts and shards. `cost`: predictions of time. `autoscale`: sizes of pools.
   `config`: the settings of everything.

Only `backoff` draws at random: the pauses of live services between attempts. No decision uses it.
`scheduler.integrity` checks all sums of the scheduler; `scheduler.recording` writes its steps down.
"""
