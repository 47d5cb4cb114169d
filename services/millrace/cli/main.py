"""The command line. Each command only reads its options and calls its module."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from millrace.cli import keys
from millrace.cli.help_text import show_help
from millrace.cli.options import (
    Autoscale,
    ColocatedRole,
    Colocation,
    ConfigPath,
    DecodeSizes,
    Devices,
    Host,
    JsonAnswer,
    KvpSize,
    MaxChunkTokens,
    Model,
    ModelName,
    ModelOrShipped,
    NoProfile,
    Port,
    PrefillSizes,
    ReadyFd,
    Record,
    ScaleToZero,
    SchedulerAddress,
    Settings,
    ShareDevices,
    Stages,
    with_stages,
)
from millrace.cli.process import (
    configure,
    leave_forks_alone,
    plain_errors,
    run_async,
    tell,
    usable_devices,
)
from millrace.cli.workers import register
from millrace.shipped import SHIPPED_MODEL

app = typer.Typer(
    name="millrace",
    help="Disaggregated LLM serving for mixed traffic: short chats and very long documents on one "
    "fleet. Times in option names: _s seconds, _ms milliseconds; sizes: bytes or tokens.",
    no_args_is_help=True,
    rich_markup_mode=None,  # loading rich takes longer than loading all our modules
    pretty_exceptions_enable=False,
    add_completion=False,
)
bench = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure: ratios taken in one run, JSON with --json PATH.",
)
app.add_typer(bench, name="bench")
sim = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Simulate: policies and planners on large clusters, on real traces or synthetic mixes.",
)
app.add_typer(sim, name="sim")

#: Package data of the wheel; in the repository, a link to models/millrace-tiny.


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        from millrace.version import version

        print(f"millrace {version()}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command()
def scheduler(
    host: Host = "127.0.0.1",
    port: Port = 7070,
    config: ConfigPath = None,
    settings: Settings = [],  # noqa: B006 - typer wants a literal default
    ready_fd: ReadyFd = None,
    record: Record = None,
) -> None:
    """Run the scheduler: it decides order, placement and decode instance of every request."""
    from millrace.scheduler.main import serve

    tree = configure(config, settings, "scheduler")
    run_async(serve(tree, host=host, port=port, on_ready=tell(ready_fd), record=record))


@app.command()
def proxy(
    model: Model,
    model_name: ModelName = "",
    scheduler: SchedulerAddress = "127.0.0.1:7070",
    host: Host = "127.0.0.1",
    port: Port = 8080,
    config: ConfigPath = None,
    settings: Settings = [],  # noqa: B006
    ready_fd: ReadyFd = None,
) -> None:
    """Run the REST gateway: OpenAI's API over HTTP, tokenising and streaming."""
    from millrace.proxy.main import serve

    tree = configure(config, [f"proxy.host={host}", f"proxy.port={port}", *settings], "proxy")
    run_async(
        serve(
            tree,
            model=model,
            model_name=model_name or None,
            scheduler=scheduler,
            on_ready=tell(ready_fd),
        )
    )


register(app)


@app.command()
def up(
    model: ModelOrShipped = str(SHIPPED_MODEL),
    model_name: ModelName = "",
    prefill: PrefillSizes = "",
    decode: DecodeSizes = "",
    colocated: Annotated[
        int,
        typer.Option(
            "--colocated",
            min=0,
            help="Instances that prefill and decode, instead of separate pools.",
        ),
    ] = 0,
    role: ColocatedRole = Colocation.PAIR,
    kvp: KvpSize = 0,
    stages: Stages = None,
    autoscale: Autoscale = False,
    scale_to_zero: ScaleToZero = False,
    max_chunk_tokens: MaxChunkTokens = None,
    host: Host = "127.0.0.1",
    port: Port = 8080,
    redis: Annotated[
        str, typer.Option("--redis", metavar="URL", help="Default: a private Redis server.")
    ] = "",
    threads: Annotated[
        int, typer.Option("--threads", help="Compute threads per instance; 0: half the cores.")
    ] = 0,
    devices: Devices = "",
    share_devices: ShareDevices = False,
    no_profile: NoProfile = False,
    config: ConfigPath = None,
    settings: Settings = [],  # noqa: B006
) -> None:
    """Run the whole stack on this machine: proxy, scheduler, prefill, decode, Redis."""
    from millrace.local.scaling import PARKING, Scaling, parse_sizes
    from millrace.local.stack import StackOptions
    from millrace.local.up import run_until_stopped

    if max_chunk_tokens is not None:
        settings = [*settings, f"engine.max_chunk_tokens={max_chunk_tokens}"]
    settings = with_stages(settings, stages)
    tree = configure(config, settings, "up")
    if tree.engine.stages > 1 and colocated and role is Colocation.PAIR:
        raise typer.BadParameter(
            f"engine.stages is {tree.engine.stages}; a pair of instances that share their weights "
            "can have 1 (--role mixed can have more)"
        )
    autoscale |= scale_to_zero
    if autoscale and colocated:
        raise typer.BadParameter("--autoscale is for prefill and decode, not for --colocated")
    if scale_to_zero and not tree.proxy.park_timeout_s:
        settings = [*settings, PARKING]
    measures = not no_profile and tree.engine.profile == "auto" and tree.engine.stages == 1
    with plain_errors():
        sizes = parse_sizes({"prefill": prefill, "decode": decode}, autoscale=autoscale)
    options = StackOptions(
        model=model,
        model_name=model_name,
        prefill=sizes["prefill"][0],
        decode=sizes["decode"][0],
        colocated=colocated,
        colocation=role,
        kvp=kvp,
        host=host,
        port=port,
        redis=redis,
        threads=threads,
        config=config,
        settings=settings,
        profile=tree.engine if measures else None,
        devices=usable_devices(tree, devices),
        devices_each=tree.engine.tensor_parallel * tree.engine.stages,
        share_devices=share_devices,
        most={role: most for role, (_, most) in sizes.items()} if autoscale else {},
    )
    with plain_errors():
        options.device_pool()
    scaling = Scaling(sizes=sizes, config=tree.scaling, to_zero=scale_to_zero)
    run_async(run_until_stopped(options, scaling if autoscale else None))


@app.command()
def profile(
    model: Annotated[
        str, typer.Argument(metavar="[FOLDER|HUB-ID]", help="Default: the shipped model.")
    ] = str(SHIPPED_MODEL),
    device: Annotated[str, typer.Option("--device", help="As engine.device.")] = "",
    dtype: Annotated[str, typer.Option("--dtype", help="As engine.dtype.")] = "",
    threads: Annotated[
        int | None,
        typer.Option("--threads", help="As engine.threads: must equal the workers' number."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", help="Longest prompt; 0: as long as the budget allows.")
    ] = 0,
    budget_s: Annotated[float, typer.Option("--budget-s", help="Seconds to measure for.")] = 60.0,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="PATH", help="Write the profile to this file, too."),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="All measured points.")
    ] = None,
    if_missing: Annotated[
        bool, typer.Option("--if-missing", help="Measure only if the cache has no such profile.")
    ] = False,
    sp: Annotated[
        str,
        typer.Option("--sp", metavar="N,...", help="Measure SP groups of N live instances, too."),
    ] = "",
    config: ConfigPath = None,
    settings: Settings = [],  # noqa: B006
) -> None:
    """Measure a model on this machine, for the scheduler and the simulator."""
    given = {"device": device, "dtype": dtype, "threads": threads}
    chosen = [f"engine.{name}={value}" for name, value in given.items() if value not in ("", None)]
    settings = [*settings, *chosen]
    tree = configure(config, settings, "profile")
    if not all(part.isdecimal() for part in sp.split(",") if sp):
        raise typer.BadParameter(f"--sp {sp!r}: write whole numbers with commas between")
    with plain_errors():
        from millrace.profiler.command import ProfileOptions, run

        options = ProfileOptions(
            model=model,
            budget_s=budget_s,
            max_tokens=max_tokens,
            out=out,
            report=json_path,
            if_missing=if_missing,
            sp=tuple(sorted({int(part) for part in sp.split(",") if part})),
            settings=settings,
            config=config,
        )
        run(options, tree.engine)


@app.command()
def demo(
    model: ModelOrShipped = str(SHIPPED_MODEL),
) -> None:
    """Start a stack, send one long and several short chats, show waterfalls, stop."""
    from millrace.cli.demo import run

    configure(None, [], "demo")
    run_async(run(model))


@app.command()
def chat(
    url: Annotated[str, typer.Option("--url", help="The gateway.")] = "http://127.0.0.1:8080",
    message: Annotated[
        str, typer.Argument(help="One message to send; without it, a conversation.")
    ] = "",
    system: Annotated[str, typer.Option("--system", help="System message.")] = "",
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1)] = 256,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0)] = 0.7,
    trace: Annotated[bool, typer.Option("--trace", help="Show each answer's waterfall.")] = False,
    api_key: Annotated[
        str, typer.Option("--api-key", envvar="MILLRACE_API_KEY", help="Sent as a bearer token.")
    ] = "",
) -> None:
    """Talk to a running gateway in the terminal."""
    from millrace.cli.chat import converse

    run_async(
        converse(
            url,
            message=message,
            system=system,
            max_tokens=max_tokens,
            temperature=temperature,
            trace=trace,
            api_key=api_key,
        )
    )


@app.command()
def policy(
    name: Annotated[str, typer.Argument(metavar="[POLICY]", help="Policy to change to.")] = "",
    weight: Annotated[
        list[str],
        typer.Option("--weight", metavar="CLASS=N", help="Weight of an SLO class; repeatable."),
    ] = [],  # noqa: B006
    tenant_weight: Annotated[
        list[str],
        typer.Option("--tenant-weight", metavar="TENANT=N", help="Weight of a tenant; repeatable."),
    ] = [],  # noqa: B006
    scheduler: SchedulerAddress = "127.0.0.1:7070",
    json_path: JsonAnswer = None,
    config: ConfigPath = None,
    settings: Settings = [],  # noqa: B006
) -> None:
    """Show or change the policy and weights by which a running scheduler orders requests."""
    from millrace.cli.policy import parse_weights, show_or_change_policy

    configure(config, settings, "policy")

    async def run() -> None:
        weights = parse_weights(weight, tenant_weight)
        await show_or_change_policy(scheduler, name, weights, json_path)

    run_async(run())


@app.command()
def fleet(
    scheduler: SchedulerAddress = "127.0.0.1:7070",
    json_path: JsonAnswer = None,
    config: ConfigPath = None,
    settings: Settings = [],  # noqa: B006
) -> None:
    """Show a running scheduler's instances, and the signals that scale its pools."""
    from millrace.cli.fleet import show

    configure(config, settings, "fleet")
    run_async(show(scheduler, json_path))


@app.command()
def explain(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="As x-request-id says.")],
    scheduler: SchedulerAddress = "127.0.0.1:7070",
    json_path: JsonAnswer = None,
    config: ConfigPath = None,
    settings: Settings = [],  # noqa: B006
) -> None:
    """Say why a request waits, or waited if it is one of the last 1,000 that ended."""
    from millrace.cli.explain import show

    configure(config, settings, "explain")
    run_async(show(scheduler, request_id, json_path))


@app.command("improvement-rate")
def improvement_rate(
    wanted: Annotated[
        str,
        typer.Argument(
            metavar="[RATE|ARRIVALS_PER_S:RATE,...]",
            help="Fixed rate from 0 to 1, or a table of rates by arrivals per second.",
        ),
    ] = "",
    scheduler: SchedulerAddress = "127.0.0.1:7070",
    config: ConfigPath = None,
    settings: Settings = [],  # noqa: B006
) -> None:
    """Show or change the share by which a larger SP group must cut the TTFT."""
    from millrace.cli.policy import show_or_change_improvement_rate

    configure(config, settings, "improvement-rate")
    run_async(show_or_change_improvement_rate(scheduler, wanted))


keys.register(app)


@app.command("config")
def show_config(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print docs/reference/configuration.md.")
    ] = False,
) -> None:
    """Print every setting with its default, range and meaning, as a TOML file."""
    from millrace.cli.config import as_markdown, as_toml

    print(as_markdown() if markdown else as_toml(), end="")


BENCHMARKS = (
    "autoscale",
    "cdsp",
    "constraints",
    "decode",
    "engine",
    "gateway",
    "gpu",
    "hol",
    "kernels",
    "long",
    "planner",
    "predictions",
    "scheduler",
    "serve",
    "transfer",
)


def _add_benchmarks(wanted: str) -> None:
    """Adds the named benchmark, or all for their help: each import takes long."""
    for name in (wanted,) if wanted in BENCHMARKS else BENCHMARKS:
        module = importlib.import_module(f"millrace.bench.{name}.command")
        bench.command(name)(module.command)


def main() -> None:
    """Entry point: imports benchmarks and the simulator only for their commands."""
    leave_forks_alone()
    if "bench" in sys.argv[1:2]:
        _add_benchmarks(next(iter(sys.argv[2:]), ""))
    if "sim" in sys.argv[1:2]:
        importlib.import_module("millrace.cli.sim.command").register(sim)
    if "--help" in sys.argv[1:]:
        show_help(app, sys.argv[1 : sys.argv.index("--help")])
    with plain_errors():
        app()
