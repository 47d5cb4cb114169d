"""The gateway's benchmark end to end, short: real proxy process, real Redis, real gRPC."""

from __future__ import annotations

from rich.console import Console

from millrace.bench.gateway.report import print_tables
from millrace.bench.gateway.run import Settings, run


async def test_measures_a_real_proxy_process():
    settings = Settings(
        requests=60, streams=4, tokens=32, prompt_characters=100, long_tokens=50_000
    )
    report = await run(settings)
    assert [cost["concurrency"] for cost in report["requests"]] == [1, 32]
    for cost in report["requests"]:
        assert cost["requests_per_s"] > 0
        assert 0 < cost["p50_us"] <= cost["p99_us"]
    paced, flat_out = report["streams"]
    assert (paced["step_ms"], flat_out["step_ms"]) == (25.0, 0.0)
    assert (paced["tokens"], flat_out["tokens"]) == (4 * 8, 4 * 32)
    assert flat_out["tokens_per_s"] > 0
    assert report["requests"][0]["cpu_us"] >= 0
    (long,) = report["long_prompts"]
    assert long["prompts"] >= 2 and long["prompts"] % 2 == 0
    assert long["next_answer_s"] > 0 and long["answer_s"] > 0
    assert 0.1 < long["body_mib"] < 1
    for gaps in (long["alone"], long["beside"]):
        assert 0 <= gaps["p50_ms"] <= gaps["p99_ms"] <= gaps["max_ms"]
    assert 0 < long["before_mib"] <= long["peak_mib"] >= long["after_mib"] > 0
    console = Console(width=80)
    with console.capture() as shown:
        print_tables(report, console)
    assert "…" not in shown.get()
    assert "CPU per streamed token, 4 streams, flat out" in shown.get()
    assert "p99 between tokens, 50,000-token prompts" in shown.get()


async def test_the_cost_of_traces_is_of_proxies_that_take_turns():
    report = await run(Settings(requests=40, tracing=True))
    costs = {cost["traces"]: cost for cost in report["tracing"]}
    assert list(costs) == ["off, no waterfalls", "off", "default", "all sampled"]
    assert costs["off"]["ratio"] == 1 and min(cost["cpu_us"] for cost in costs.values()) > 0
    console = Console(width=80)
    with console.capture() as shown:
        print_tables(report, console)
    assert "CPU per request, traces all sampled" in shown.get()
