"""Counts the scheduler's sums again, from the requests and the holdings."""

from __future__ import annotations

import math

from millrace.core.errors import IntegrityError
from millrace.core.kv.pages import pages_for, pages_of_plan
from millrace.core.live_request import LiveRequest
from millrace.core.request import RequestState
from millrace.core.scheduler.fleet.cluster import Cluster
from millrace.core.scheduler.fleet.freeness import freeness
from millrace.core.scheduler.fleet.instances import (
    DecodeInstance,
    Instance,
    KvpInstance,
    PrefillInstance,
)
from millrace.core.scheduler.fleet.run_queue import RunQueue
from millrace.core.scheduler.fleet.waiting_queue import WaitingQueue
from millrace.core.scheduler.request_table import RequestTable


def check(table: RequestTable) -> None:
    """Raises IntegrityError that names the instance or request and both values."""
    _check_pools(table.cluster)
    for instance in table.cluster.instances.values():
        _check_sums(instance)
        _check_holdings(instance, table)
        if isinstance(instance, DecodeInstance):
            _check_freeness(instance)
    for request in table.requests.values():
        _check_request(request, table)
    _check_waiting_queue("unplaced", table.unplaced)
    for model_hash, pool in table.cluster.pools.items():
        _check_waiting_queue(f"pool {model_hash}", pool.waiting)
    queued = {r.id for r in table.requests.values() if r.state is RequestState.QUEUED}
    _same("queued requests", table.waiting_queue_of.keys(), queued)
    by_proxy: dict[str, set[str]] = {}
    for request in table.requests.values():
        by_proxy.setdefault(request.proxy_id, set()).add(request.id)
    kept = {proxy_id: set(mine) for proxy_id, mine in table.by_proxy.items()}
    _same("requests by proxy", kept, by_proxy)


def _same(what: str, kept: object, counted: object) -> None:
    if kept != counted:
        raise IntegrityError(f"{what}: kept {kept!r}, counted {counted!r}")


def _check_pools(cluster: Cluster) -> None:
    members: dict[str, list[Instance]] = {}
    for instance in cluster.instances.values():
        members.setdefault(instance.card.model_hash, []).append(instance)
    _same("pools", cluster.pools.keys(), members.keys())
    for model_hash, of_pool in members.items():
        kept = cluster.pools[model_hash]
        _same(f"members of pool {model_hash}", kept.members, len(of_pool))
        taking = {i.id: i for i in of_pool if not i.draining}
        prefill = {i: one for i, one in taking.items() if isinstance(one, PrefillInstance)}
        decode = {i: one for i, one in taking.items() if isinstance(one, DecodeInstance)}
        _same(f"prefill of pool {model_hash}", kept.prefill, prefill)
        kvp = {i: one for i, one in taking.items() if isinstance(one, KvpInstance)}
        _same(f"decode of pool {model_hash}", kept.decode, decode)
        _same(f"kvp of pool {model_hash}", kept.kvp, kvp)
        mixed = sum(one.card.role == "mixed" for one in decode.values())
        _same(f"prefilling of pool {model_hash}", kept.prefillers, len(prefill) + mixed)
        _check_run_queue(model_hash, kept.run_queue, of_pool)


def _check_run_queue(model_hash: str, run_queue: RunQueue, members: list[Instance]) -> None:
    """Checks that every task stands once in the ranking and once in each member's queue, and
    nowhere else.
    """
    ranked = sorted(run_queue.ranked, key=lambda task: task.rank)
    _same(f"run queue of {model_hash}: ranking", run_queue.ranked, ranked)
    of_requests = {id(task) for tasks in run_queue.tasks.values() for task in tasks}
    _same(f"run queue of {model_hash}: tasks", {id(task) for task in ranked}, of_requests)
    everyone = 0
    for instance in members:
        if isinstance(instance, PrefillInstance):
            everyone |= instance.bit
            mine = {id(task) for task in ranked if instance in task.members}
            queue = [id(task) for task in instance.queue]
            _same(f"{instance.id}: queue", (len(queue), set(queue)), (len(mine), mine))
    _same(f"run queue of {model_hash}: members", run_queue.everyone, everyone)
    claimed = 0
    for task in ranked:
        if task.chosen:
            twice = claimed & task.mask
            _same(f"run queue of {model_hash}: members of two running tasks", twice, 0)
            claimed |= task.mask


def _check_sums(instance: Instance) -> None:
    name, holdings = instance.id, instance.holdings.values()
    _same(
        f"{name}: drains, as one that leaves does", instance.draining or not instance.leaving, True
    )
    used = sum(h.pages for h in holdings)
    if isinstance(instance, DecodeInstance):
        batch = [h for h in holdings if h.decoding]
        decoding, shards = (
            sum(h.pages for h in some) for some in (batch, [h for h in holdings if h.is_shard])
        )
        _same(f"{name}: pages of shards", instance.shard_pages, shards)
        _same(f"{name}: virtual pages", instance.virtual_pages, used - decoding - shards)
        _same(f"{name}: decoding pages", instance.decoding_pages, decoding)
        _same(f"{name}: batch size", instance.batch_size, sum(h.sequences for h in batch))
        _same(f"{name}: booked pages", instance.booked_pages, used)
        _same(f"{name}: sequences", instance.sequences, sum(h.sequences for h in holdings))
        tokens = sum(h.context_tokens for h in holdings)
        _same(f"{name}: context tokens", instance.context_tokens, tokens)
        tightest_s = min((h.tbt_s for h in holdings), default=math.inf)
        _same(f"{name}: tightest TBT objective", instance.tightest_tbt_s, tightest_s)
    else:
        _same(f"{name}: used pages", instance.used_pages, used)
    if isinstance(instance, PrefillInstance):
        tasks = [request.id for task in instance.queue for request in task.requests]
        if not set(tasks) <= instance.holdings.keys():
            raise IntegrityError(f"{name}: tasks {tasks} are not all held")
    if used > instance.card.kv_pages:
        raise IntegrityError(f"{name}: {used} of {instance.card.kv_pages} pages are given away")


def _check_freeness(instance: DecodeInstance) -> None:
    size, free, virtual = instance.page_tokens, instance.free_pages, instance.virtual_pages
    counted = freeness(free * size, virtual * size, instance.batch_size)
    _same(f"{instance.id}: freeness", instance.freeness, counted)


def _check_holdings(instance: Instance, table: RequestTable) -> None:
    """Checks that a counted holding belongs to a live request that names the instance; the rest
    leaves.
    """
    for request_id, holding in instance.holdings.items():
        if holding.leaving:
            continue
        request = table.requests.get(request_id)
        if request is None or instance.id not in _named(request):
            raise IntegrityError(f"{instance.id}: holds {request_id}, which does not need it")
        if isinstance(instance, PrefillInstance):
            card = instance.card
            taken = pages_of_plan(request.chunks, card.page_tokens, card.kv_layers)
            pages = taken[instance.id]
        elif request.shards:
            (shard,) = (one for one in request.shards if one.worker_id == instance.id)
            pages = pages_for(shard.num_tokens, instance.card.page_tokens)
        else:
            assert isinstance(instance, DecodeInstance)  # a KVP worker holds nothing else
            pages = instance.booked_for(request)
        _same(f"{instance.id}: pages of {request_id}", holding.pages, pages)


def _check_shards(request: LiveRequest, table: RequestTable) -> None:
    """Checks that shards cover the request, end to end.

    KVP workers may free them after the first token.
    """
    ends = [0, *(shard.end_token for shard in request.shards)]
    starts = [*(shard.start_token for shard in request.shards), ends[-1]]
    _same(f"{request.id}: where its shards begin", starts, ends)
    _same(f"{request.id}: KV owner of its shards", request.shards[0].worker_id, request.decode_id)
    tokens = request.prompt_tokens + request.max_new_tokens
    _same(f"{request.id}: tokens of its shards", ends[-1], tokens)
    if request.state in (RequestState.QUEUED, RequestState.PREFILLING):
        for instance_id in request.kv_instance_ids:
            holder = table.cluster.instances.get(instance_id)
            if holder is None or table.served(request.id, holder) is not request:
                raise IntegrityError(f"{request.id}: has a shard at {instance_id}, which lacks it")


def _check_request(request: LiveRequest, table: RequestTable) -> None:
    """Checks that a live request holds the resources of its state."""
    instances = table.cluster.instances
    decode = instances.get(request.decode_id or "")
    held = decode is not None and table.served(request.id, decode) is request
    _same(f"{request.id}: held by decode", held, request.decode_id is not None)
    if isinstance(decode, DecodeInstance):
        decodes = request.state is RequestState.DECODING
        _same(f"{request.id}: in the batch", decode.holdings[request.id].decoding, decodes)
    _check_prefix(request)
    if request.shards:
        _check_shards(request, table)
    if request.state is RequestState.QUEUED:
        _same(f"{request.id}: chunks", request.chunks, ())
        line = table.waiting_queue_of.get(request.id)
        if line is None or request.id not in line or line not in _lines(request, table):
            raise IntegrityError(f"{request.id}: waits in no queue, or in the wrong one")
    if request.state is RequestState.PREFILLING:
        for instance_id in _computing(request, table):
            prefill = instances.get(instance_id)
            if prefill is None or table.served(request.id, prefill) is not request:
                raise IntegrityError(f"{request.id}: prefills at {instance_id}, which lacks it")


def _lines(request: LiveRequest, table: RequestTable) -> list[WaitingQueue]:
    """The queues in which a queued request may wait."""
    decode = table.cluster.instances.get(request.decode_id or "")
    if decode is not None:
        return [table.cluster.pool_of(decode).waiting]
    pools = table.cluster.pools.values() if request.prefill_only else ()
    return [table.unplaced, *(pool.waiting for pool in pools)]


def _computing(request: LiveRequest, table: RequestTable) -> set[str]:
    """The prefill instances that the request still needs: members may have done their part."""
    run_queue = table.run_queue_of.get(request.id)
    tasks = run_queue.tasks[request.id] if run_queue is not None else ()
    members = {member.id for task in tasks for member in task.members}
    return members | ({request.chunks[0].instance_ids[0]} - {request.decode_id})


def _check_prefix(request: LiveRequest) -> None:
    """Checks that decode keeps the beginning of the landed tokens, and chunks begin after it."""
    name, kept = request.id, request.kept_tokens
    if not 0 <= kept <= request.landed_tokens <= request.prompt_tokens:
        raise IntegrityError(
            f"{name}: {kept} tokens are kept of {request.landed_tokens} that landed, "
            f"of {request.prompt_tokens}"
        )
    if request.chunks:
        _same(f"{name}: where its chunks begin", request.chunks[0].start_token, kept)
        tokens = sum(chunk.num_tokens for chunk in request.chunks)
        _same(f"{name}: tokens of its chunks", tokens, request.prompt_tokens - kept)
    if kept and request.decode_id is None:
        raise IntegrityError(f"{name}: {kept} tokens are kept nowhere")


def _check_waiting_queue(name: str, line: WaitingQueue) -> None:
    work_s = math.fsum(request.predicted_prefill_s for request in line)
    if not math.isclose(line.work_s, work_s, rel_tol=1e-6, abs_tol=1e-6):
        raise IntegrityError(f"{name}: kept {line.work_s} s of work, counted {work_s} s")
    ids = [request.id for request in line]
    if len(set(ids)) != len(ids):
        raise IntegrityError(f"{name}: a request waits twice in {ids}")


def _named(request: LiveRequest) -> set[str]:
    """Returns the instances of the request's current attempt."""
    ids = {instance_id for chunk in request.chunks for instance_id in chunk.instance_ids}
    return ids.union(request.kv_instance_ids)
