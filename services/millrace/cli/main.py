"""The command line. Each command only reads its options and calls its module."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from millrace.cli import on_this_machine, running
from millrace.cli import options as of
from millrace.cli.commands import keys, redis_acl
from millrace.cli.help_text import show_help
from millrace.cli.process import (
    configure,
    full_output,
    leave_forks_alone,
    open_standard_files,
    plain_errors,
    reach_this_machine_directly,
    run_async,
    tell,
    write_any_text,
)
from millrace.cli.workers import register
from millrace.file_options import READ, WRITE

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
    reach_this_machine_directly()


@app.command()
def scheduler(
    host: of.Host = "127.0.0.1",
    port: of.Port = 7070,
    config: of.ConfigPath = None,
    settings: of.Settings = [],  # noqa: B006 - typer wants a literal default
    ready_fd: of.ReadyFd = None,
    record: of.Record = None,
    advertise: of.Advertise = "",
) -> None:
    """Run the scheduler: it decides order, placement and decode instance of every request.

    Of several schedulers with the same store, one leads and the others stand by.
    """
    from millrace.scheduler.main import serve

    tree = configure(config, settings, "scheduler")
    tell_ready = tell(ready_fd)
    work = serve(
        tree, host=host, port=port, advertise=advertise, on_ready=tell_ready, record=record
    )
    run_async(work)


@app.command()
def proxy(
    model: of.ModelOrFile = "",
    model_name: of.ModelName = "",
    scheduler: of.SchedulerAddress = "127.0.0.1:7070",
    host: of.GatewayHost = None,
    port: of.GatewayPort = None,
    config: of.ConfigPath = None,
    settings: of.Settings = [],  # noqa: B006
    ready_fd: of.ReadyFd = None,
) -> None:
    """Run the REST gateway: OpenAI's API over HTTP, tokenising and streaming."""
    from millrace.core.config.models import ModelConfig
    from millrace.proxy.main import serve

    tree = configure(config, of.with_address(settings, host, port), "proxy")
    if bool(model) == bool(tree.proxy.models_file):
        raise typer.BadParameter("give either --model or the setting proxy.models_file")
    served = ModelConfig(name=model_name, model=model, scheduler=scheduler) if model else None
    run_async(serve(tree, served, on_ready=tell(ready_fd)))


@app.command()
def stage(
    model: of.Model,
    host: of.Host = "127.0.0.1",
    port: of.Port = 0,
    drain_timeout_s: of.DrainTimeout = 30.0,
    config: of.ConfigPath = None,
    settings: of.Settings = [],  # noqa: B006
    ready_fd: of.ReadyFd = None,
) -> None:
    """Run a later stage of an instance on another host, which has engine.stage_hosts."""
    tree = configure(config, settings, "stage")
    from millrace.instance.stages.remote.main import serve

    run_async(serve(model, tree, host, port, drain_timeout_s, tell(ready_fd)))


register(app)


on_this_machine.register(app)
running.register(app)
keys.register(app)
redis_acl.register(app)


@app.command()
def board(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Of `millrace sim run --board`, or a recording of `--record`.",
            **READ,
        ),
    ],
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="PATH", help="Write one page that needs no server.", **WRITE
        ),
    ] = None,
    port: of.Port = 0,
) -> None:
    """Show a recorded or simulated run in the browser: a server on this machine, or a page."""
    from millrace.cli.commands.board import page_of, serve, write_page

    with plain_errors():
        page = page_of(path)
        if html is not None:
            write_page(page, html)
        else:
            serve(page, port)


@app.command()
def report(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="A recording of `--record`. Default: what the scheduler has noted in Redis, at "
            "store.url.",
            **READ,
        ),
    ] = None,
    from_: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="TIME",
            help="Requests that came then or later: seconds after the run's begin, or a time such "
            "as 2026-01-31T14:30.",
        ),
    ] = "",
    to: Annotated[
        str, typer.Option("--to", metavar="TIME", help="Requests that came before it.")
    ] = "",
    worst: Annotated[
        int, typer.Option("--worst", min=0, help="Late requests that are listed.")
    ] = 5,
    json_path: of.JsonAnswer = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page instead.", **WRITE)
    ] = None,
    config: of.ConfigPath = None,
    settings: of.Settings = [],  # noqa: B006
) -> None:
    """Report a run: objectives met, the worst requests and why, headroom, pool sizes."""
    from millrace.cli.commands.report import kept_outcomes, recording_at, show

    with plain_errors():
        if path is None:
            source = kept_outcomes(configure(config, settings, "report"))
        else:
            source = recording_at(path)
        show(source, from_=from_, to=to, worst=worst, json_path=json_path, page=html)


@app.command("config")
def show_config(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print docs/reference/configuration.md.")
    ] = False,
) -> None:
    """Print every setting with its default, range and meaning, as a TOML file."""
    from millrace.cli.commands.config import as_markdown, as_toml

    print(as_markdown() if markdown else as_toml(), end="")


BENCHMARKS = (
    "autoscale",
    "cdsp",
    "chaos",
    "constraints",
    "decode",
    "engine",
    "gateway",
    "gpu",
    "hol",
    "kernels",
    "long",
    "overload",
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
    open_standard_files()
    write_any_text()
    leave_forks_alone()
    reach_this_machine_directly()
    if "bench" in sys.argv[1:2]:
        _add_benchmarks(next(iter(sys.argv[2:]), ""))
    if "sim" in sys.argv[1:2]:
        importlib.import_module("millrace.cli.sim.command").register(sim)
    with full_output(), plain_errors():
        if "--help" in sys.argv[1:]:
            show_help(app, sys.argv[1 : sys.argv.index("--help")])
        app()
