"""The commands that run or measure a stack on this machine: `millrace up`, `profile`, `demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from millrace.cli import options as of
from millrace.cli.process import configure, plain_errors, run_async, usable_devices
from millrace.file_options import WRITE
from millrace.shipped import SHIPPED_MODEL


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("up")(up)
    app.command("profile")(profile)
    app.command("demo")(demo)


def up(  # noqa: PLR0913 - every option of the command line is a parameter
    model: of.ModelsOrShipped = [str(SHIPPED_MODEL)],  # noqa: B006
    model_name: of.ModelNames = [],  # noqa: B006
    prefill: of.PrefillSizes = "",
    decode: of.DecodeSizes = "",
    colocated: Annotated[
        int,
        typer.Option(
            "--colocated",
            min=0,
            help="Instances that prefill and decode, instead of separate pools.",
        ),
    ] = 0,
    role: of.ColocatedRole = of.Colocation.PAIR,
    kvp: of.KvpSize = 0,
    schedulers: of.Schedulers = 1,
    stages: of.Stages = None,
    autoscale: of.Autoscale = False,
    scale_to_zero: of.ScaleToZero = False,
    max_chunk_tokens: of.MaxChunkTokens = None,
    host: of.GatewayHost = None,
    port: of.GatewayPort = None,
    redis: Annotated[
        str,
        typer.Option(
            "--redis", metavar="URL", help="Default: store.url, or a private Redis server."
        ),
    ] = "",
    tls: Annotated[
        bool,
        typer.Option("--tls", help="Mutual TLS between the services, by certificates made now."),
    ] = False,
    threads: Annotated[
        int,
        typer.Option(
            "--threads",
            min=0,
            help="Compute threads per instance. 0: engine.threads, else half the cores.",
        ),
    ] = 0,
    devices: of.Devices = "",
    share_devices: of.ShareDevices = False,
    no_profile: of.NoProfile = False,
    record: of.Record = None,
    config: of.ConfigPath = None,
    settings: of.Settings = [],  # noqa: B006
) -> None:
    """Run the whole stack on this machine: proxy, scheduler, prefill, decode, Redis."""
    from millrace.core.config import StoreConfig
    from millrace.local.options import StackOptions
    from millrace.local.scaling import PARKING, Scaling, parse_sizes
    from millrace.local.up import run_until_stopped

    if max_chunk_tokens is not None:
        settings = [*settings, f"engine.max_chunk_tokens={max_chunk_tokens}"]
    settings = of.with_address(of.with_stages(settings, stages), host, port)
    tree = configure(config, settings, "up")
    if tree.engine.stages > 1 and colocated and role is of.Colocation.PAIR:
        raise typer.BadParameter(
            f"engine.stages is {tree.engine.stages}; a pair of instances that share their weights "
            "can have 1 (--role mixed can have more)"
        )
    if model_name and len(model_name) != len(model):
        raise typer.BadParameter(
            f"{len(model)} models and {len(model_name)} names: give every model a --model-name, or "
            "none"
        )
    named = list(zip(model, model_name or [""] * len(model), strict=True))
    if tls and tree.tls.enabled:
        raise typer.BadParameter(
            f"--tls makes certificates, and tls.ca_file is {tree.tls.ca_file!r}: leave one out"
        )
    autoscale |= scale_to_zero
    if autoscale and len(named) > 1:
        raise typer.BadParameter("--autoscale is for one model")
    if autoscale and colocated:
        raise typer.BadParameter("--autoscale is for prefill and decode, not for --colocated")
    if scale_to_zero and not tree.proxy.park_timeout_s:
        settings = [*settings, PARKING]
    measures = not no_profile and tree.engine.profile == "auto" and tree.engine.stages == 1
    with plain_errors():
        sizes = parse_sizes({"prefill": prefill, "decode": decode}, autoscale=autoscale)
    options = StackOptions(
        model=named[0][0],
        model_name=named[0][1],
        more=named[1:],
        prefill=sizes["prefill"][0],
        decode=sizes["decode"][0],
        colocated=colocated,
        colocation=role,
        kvp=kvp,
        schedulers=schedulers,
        host=tree.proxy.host,
        port=tree.proxy.port,
        redis=redis or (tree.store.url if tree.store.url != StoreConfig.url else ""),
        files=tree.files.url,
        metrics_port=tree.telemetry.metrics_port,
        tls=tls,
        threads=threads or tree.engine.threads,
        config=config,
        record=record,
        settings=settings,
        profile=tree.engine if measures else None,
        devices=usable_devices(tree, devices),
        devices_each=tree.engine.tensor_parallel * tree.engine.stages,
        share_devices=share_devices,
        most={role: most for role, (_, most) in sizes.items()} if autoscale else {},
    )
    with plain_errors():
        options.models()
        options.device_pool()
    scaling = Scaling(sizes=sizes, config=tree.scaling, to_zero=scale_to_zero)
    run_async(run_until_stopped(options, scaling if autoscale else None))


def profile(  # noqa: PLR0913
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
        Path | None, typer.Option("--json", metavar="PATH", help="All measured points.", **WRITE)
    ] = None,
    if_missing: Annotated[
        bool, typer.Option("--if-missing", help="Measure only if the cache has no such profile.")
    ] = False,
    sp: Annotated[
        str,
        typer.Option("--sp", metavar="N,...", help="Measure SP groups of N live instances, too."),
    ] = "",
    config: of.ConfigPath = None,
    settings: of.Settings = [],  # noqa: B006
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


def demo(
    model: of.ModelOrShipped = str(SHIPPED_MODEL),
) -> None:
    """Start a stack, send one long and several short chats, show waterfalls, stop."""
    from millrace.cli.commands.demo import run
    from millrace.concurrency import interruptible

    configure(None, [], "demo")
    run_async(interruptible(run(model)))
