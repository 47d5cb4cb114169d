"""The table of metrics (docs/reference/metrics.md) is what a stack exposes, and no more."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache

import httpx
import pytest
from docs.reference.generate import ROOT
from docs.reference.metrics_in_code import metrics
from prometheus_client.parser import text_string_to_metric_families

from millrace.local.options import StackOptions
from millrace.local.stack import Stack
from millrace.telemetry.vllm_names import ALIASES
from support.control_plane import free_ports
from support.deadlines import HANG_S
from support.live_stack import POOL_BYTES, complete
from support.metrics import total
from support.served_model import served_folder
from support.tiny_models import prompt

MODEL = "llama"


@asynccontextmanager
async def scraped(tmp_path: str, **sizes: object) -> AsyncIterator[dict[str, str]]:
    """Runs a stack, asks it for two answers, and yields the metrics of each role as text."""
    roles = ("scheduler", "prefill", "decode", "kvp", "colocated")
    ports = dict(zip(roles, free_ports(len(roles)), strict=True))
    options = StackOptions(
        model=str(served_folder(MODEL)),
        model_name="tiny",
        port=0,
        threads=1,
        start_timeout_s=2 * HANG_S,
        settings=[
            *(f"engine.kv_bytes={POOL_BYTES}", "engine.dtype=float32"),
            *("telemetry.vllm_names=on", "telemetry.trace_ratio=1"),
            f"telemetry.trace_folder={tmp_path}",
            f"telemetry.metrics_port={ports['scheduler']}",  # instances have their own
        ],
        role_settings={role: [f"telemetry.metrics_port={port}"] for role, port in ports.items()},
        **sizes,
    )
    async with Stack(options) as stack, httpx.AsyncClient(timeout=2 * HANG_S) as client:
        async with httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as asking:
            for seed in range(2):
                await complete(asking, prompt=prompt(100, 1), max_tokens=4, seed=seed)
        found = {"proxy": (await client.get(f"{stack.url}/metrics")).text}
        for role in {name.rpartition("-")[0] or name for name in stack.services} - {"proxy"}:
            found[role] = (await client.get(f"http://127.0.0.1:{ports[role]}/metrics")).text
        yield found


def names(text: str, prefix: str) -> set[str]:
    """Names as they are registered: a counter's with `_total`."""
    return {
        family.name + ("_total" if family.type == "counter" else "")
        for family in text_string_to_metric_families(text)
        if family.name.startswith(prefix) and not family.name.endswith("_created")
    }


@cache
def documented() -> list[str]:
    return [metric.name for metric in metrics(ROOT)]


def table(*areas: str, role: str = "") -> set[str]:
    every = {name.replace("ROLE", role) for name in documented()}
    return {name for name in every if name.split("_")[1] in areas}


async def test_processes_expose_the_metrics_of_the_table(tmp_path) -> None:
    async with scraped(str(tmp_path), prefill=1, decode=1, kvp=1) as found:
        pass
    own = {role: names(text, "millrace_") for role, text in found.items()}
    every = ("kv", "transfer", "trace", "attention")
    assert own["proxy"] == table("proxy")
    assert own["scheduler"] == table("scheduler", "trace")
    assert own["prefill"] == table("prefill", *every, role="prefill")
    assert own["decode"] == table("decode", "kvp", *every, role="decode") - {
        "millrace_kvp_running_requests",
        "millrace_kvp_waiting_requests",
    }
    aliases = {alias.name for alias in ALIASES}
    assert names(found["proxy"], "vllm:") | names(found["decode"], "vllm:") == aliases
    tokens = {"model_name": "tiny", "engine": "0"}
    assert total(found["proxy"], "vllm:prompt_tokens_total", **tokens) == 200
    assert total(found["proxy"], "vllm:generation_tokens_total", **tokens) == 8
    success = {"finished_reason": "length", **tokens}
    assert total(found["proxy"], "vllm:request_success_total", **success) == 2
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert total(found["proxy"], f"vllm:{name}_count", **tokens) == 2
    assert total(found["proxy"], "vllm:inter_token_latency_seconds_count", **tokens) == 6
    assert total(found["proxy"], "vllm:prefix_cache_queries_total", **tokens) == 200
    spans = total(found["prefill"], "millrace_trace_span_seconds_count", span="chunk")
    assert spans == 2
    assert spans == total(found["prefill"], "millrace_prefill_compute_seconds_count")


@pytest.mark.slow
async def test_a_mixed_instance_exposes_the_metrics_of_the_table(tmp_path) -> None:
    async with scraped(str(tmp_path), colocated=1, colocation="mixed") as found:
        pass
    own = names(found["colocated"], "millrace_")
    areas = ("decode", "mixed", "kvp", "kv", "transfer", "trace", "attention")
    of_prefill = {"millrace_prefill_device_steps_total"}  # it computes rows of prompts, too
    assert own == of_prefill | table(*areas, role="mixed") - {
        "millrace_kvp_running_requests",
        "millrace_kvp_waiting_requests",
    }
