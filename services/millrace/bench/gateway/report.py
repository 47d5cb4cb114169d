"""Prints the results of `millrace bench gateway` as a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console

from millrace.tables import table


def print_tables(report: dict[str, Any], console: Console) -> None:
    """Prints one row per figure, with its goal if there is one."""
    made = table(
        f"Gateway, prompts of {report['prompt_characters']} characters",
        "measure | result | goal",
        "{0} | {1} | {2}",
        (dict(zip("012", row, strict=True)) for row in _rows(report)),
        left=1,
    )
    console.print(made)


def _rows(report: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for cost in report.get("tracing", ()):
        cpu, ratio = f"{cost['cpu_us']:.0f} us", f"{cost['ratio']:.3f} of off"
        yield f"CPU per request, traces {cost['traces']}", f"{cpu}, {ratio}", ""
    if "tracing" in report:
        return
    goals = report["goals"]
    for cost in report["requests"]:
        at = f"{cost['concurrency']} at a time"
        which = "cpu_us_per_request_alone" if cost["concurrency"] == 1 else "cpu_us_per_request"
        goal = f"{goals[which]:.0f} us"
        yield f"CPU per request, {at}", f"{cost['cpu_us']:.0f} us", goal
        latency = f"{cost['p50_us'] / 1e3:.1f} / {cost['p99_us'] / 1e3:.1f} ms"
        yield f"added latency p50 / p99, {at}", latency, ""
        yield f"requests, {at}", f"{cost['requests_per_s']:.0f} /s", ""
    for stream in report["streams"]:
        pace = f"every {stream['step_ms']:.0f} ms" if stream["step_ms"] else "flat out"
        at, goal = f"{stream['streams']} streams, {pace}", f"{goals['cpu_us_per_token']:.0f} us"
        yield f"CPU per streamed token, {at}", f"{stream['cpu_us_per_token']:.1f} us", goal
        yield f"streamed tokens, {at}", f"{stream['tokens_per_s']:.0f} /s", ""
    for long in report["long_prompts"]:
        beside = f"{long['prompt_tokens']:,}-token prompts"
        alone, now = long["alone"]["p99_ms"], long["beside"]["p99_ms"]
        goal = f"{alone + goals['p99_grows_ms']:.1f} ms"
        yield f"p99 between tokens, {long['streams']} streams", f"{alone:.1f} ms", ""
        yield f"p99 between tokens, {beside}", f"{now:.1f} ms", goal
        memory = "{before_mib:.0f} / {peak_mib:.0f} / {after_mib:.0f} MiB".format_map(long)
        yield "memory before / at most / after them", memory, ""
        yield "answer to such a prompt", f"{long['answer_s']:.2f} s", ""
        yield "answer to the chat's next turn", f"{long['next_answer_s']:.2f} s", ""
