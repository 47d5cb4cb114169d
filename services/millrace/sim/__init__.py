"""Simulates clusters with the live scheduler's own decisions, at any speed.

Read the modules in this order.

1. `scenario`: one simulation from its description. `loop`: the clock, and the machine in between.
2. `cluster`: the instances and jobs of a simulation. `fleet`: instances join and leave.
3. `models`: how long prefill, transfer and decode take.
4. `workload`: traces and synthetic requests. `objectives`: objectives for requests without any.
5. `results` and `reports`: what was measured. `studies`: several runs, such as a sweep.

`replay` steps the machine through a recorded live run.
"""
