"""Makes the tasks of a request's chunks, with their predicted times."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.core.cost.correction import band_of
from millrace.core.live_request import LiveRequest
from millrace.core.priority import PriorityKey
from millrace.core.request import Chunk
from millrace.core.scheduler.fleet.cluster import Cluster
from millrace.core.scheduler.fleet.instances import PrefillInstance
from millrace.core.scheduler.fleet.pool import Pool
from millrace.core.scheduler.fleet.task import Task, masks


def tasks_of(
    cluster: Cluster,
    pool: Pool,
    requests: list[LiveRequest],
    chunks: Sequence[Chunk],
    key: PriorityKey,
    cached_tokens: int = 0,
) -> list[Task]:
    """Returns a task per chunk of `requests[0]`, in order; `requests[1:]` are computed with it.

    `cached_tokens`: of the first chunk, that its one instance has in its prefix cache.
    """
    head, *together = requests
    tasks: list[Task] = []
    for chunk in chunks:
        members = tuple(_prefill(cluster, instance_id) for instance_id in chunk.instance_ids)
        tokens = chunk.num_tokens + sum(one.prompt_tokens for one in together)
        history = chunk.start_token + cached_tokens
        modelled_s = pool.latency.chunk_s(tokens - cached_tokens, history, len(members))
        band = band_of(chunk.start_token + chunk.num_tokens, len(members))
        corrections = cluster.corrections
        task = Task(
            requests=requests,
            chunk=chunk,
            members=members,
            mask=masks(members),
            modelled_s=modelled_s,
            predicted_s=max(corrections.seconds(m.id, band, modelled_s) for m in members),
            band=band,
            batched=bool(together),
            is_alone=len(chunks) == 1 and not any(m.queue for m in members),
            rank=(key, head.order, chunk.index),
            previous=tasks[-1] if tasks else None,
        )
        tasks.append(task)
    return tasks


def _prefill(cluster: Cluster, instance_id: str) -> PrefillInstance:
    instance = cluster.instances[instance_id]
    assert isinstance(instance, PrefillInstance)  # of no other role is a member of a group
    return instance
