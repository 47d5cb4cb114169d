"""The commands that ask a running stack: its gateway, its scheduler or its files of traces."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from millrace.cli import options as of
from millrace.cli.process import configure, plain_errors, run_async
from millrace.core.errors import MillraceError
from millrace.file_options import READ, WRITE


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("chat")(chat)
    app.command("policy")(policy)
    app.command("fleet")(fleet)
    app.command("top")(top)
    app.command("doctor")(doctor)
    app.command("explain")(explain)
    app.command("improvement-rate")(improvement_rate)
    app.command("trace")(trace)


def chat(
    url: of.GatewayUrl = "http://127.0.0.1:8080",
    message: Annotated[
        str, typer.Argument(help="One message to send; without it, a conversation.")
    ] = "",
    system: Annotated[str, typer.Option("--system", help="System message.")] = "",
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1)] = 256,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0)] = 0.7,
    trace: Annotated[bool, typer.Option("--trace", help="Show each answer's waterfall.")] = False,
    api_key: of.ApiKey = "",
) -> None:
    """Talk to a running gateway in the terminal."""
    from millrace.cli.commands.chat import converse

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
    scheduler: of.SchedulerAddress = "127.0.0.1:7070",
    json_path: of.JsonAnswer = None,
    config: of.ConfigPath = None,
    settings: of.Settings = [],  # noqa: B006
) -> None:
    """Show or change the policy and weights by which a running scheduler orders requests."""
    from millrace.cli.commands.policy import parse_weights, show_or_change_policy

    configure(config, settings, "policy")

    async def run() -> None:
        weights = parse_weights(weight, tenant_weight)
        await show_or_change_policy(scheduler, name, weights, json_path)

    run_async(run())


def fleet(
    scheduler: of.SchedulerAddress = "127.0.0.1:7070",
    json_path: of.JsonAnswer = None,
    config: of.ConfigPath = None,
    settings: of.Settings = [],  # noqa: B006
) -> None:
    """Show a running scheduler's instances, and the signals that scale its pools."""
    from millrace.cli.commands.fleet import show

    configure(config, settings, "fleet")
    run_async(show(scheduler, json_path))


def top(
    scheduler: of.SchedulerAddress = "127.0.0.1:7070",
    config: of.ConfigPath = None,
    settings: of.Settings = [],  # noqa: B006
) -> None:
    """Follow a running scheduler's instances and requests in the terminal."""
    from millrace.cli.top.app import Top
    from millrace.wire.clients.scheduler_client import watch_board

    configure(config, settings, "top")
    with plain_errors():
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise MillraceError("top draws on a terminal; `millrace fleet` prints the state once")
        Top(lambda: watch_board(scheduler)).run()


def doctor(
    scheduler: of.SchedulerAddress = "127.0.0.1:7070",
    json_path: of.JsonAnswer = None,
    config: of.ConfigPath = None,
    settings: of.Settings = [],  # noqa: B006
) -> None:
    """Check a deployment: versions, Redis, clocks, instances, and KV between every two of them."""
    from millrace.cli.doctor.run import run

    run_async(run(configure(config, settings, "doctor"), scheduler, json_path))


def explain(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="As x-request-id says.")],
    scheduler: of.SchedulerAddress = "127.0.0.1:7070",
    recording: Annotated[
        Path | None,
        typer.Option(
            "--recording",
            metavar="FILE",
            help="Of --record: explain a request of that run.",
            **READ,
        ),
    ] = None,
    json_path: of.JsonAnswer = None,
    config: of.ConfigPath = None,
    settings: of.Settings = [],  # noqa: B006
) -> None:
    """Say why a request waits, or waited if it is one of the last 1,000 that ended."""
    from millrace.cli.commands.explain import show, show_recorded

    configure(config, settings, "explain")
    if recording is None:
        run_async(show(scheduler, request_id, json_path))
        return
    with plain_errors():
        show_recorded(recording, request_id, json_path)


def improvement_rate(
    wanted: Annotated[
        str,
        typer.Argument(
            metavar="[RATE|ARRIVALS_PER_S:RATE,...]",
            help="Fixed rate from 0 to 1, or a table of rates by arrivals per second.",
        ),
    ] = "",
    scheduler: of.SchedulerAddress = "127.0.0.1:7070",
    config: of.ConfigPath = None,
    settings: of.Settings = [],  # noqa: B006
) -> None:
    """Show or change the share by which a larger SP group must cut the TTFT."""
    from millrace.cli.commands.policy import show_or_change_improvement_rate

    configure(config, settings, "improvement-rate")
    run_async(show_or_change_improvement_rate(scheduler, wanted))


def trace(
    wanted: Annotated[str, typer.Argument(metavar="ID", help="As x-request-id says.")],
    url: of.GatewayUrl = "http://127.0.0.1:8080",
    api_key: of.ApiKey = "",
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder",
            help="Read telemetry.trace_folder instead: all spans, also of old requests. ID may "
            "be a trace's.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page instead.", **WRITE)
    ] = None,
) -> None:
    """Draw where a request's time went: asks the gateway, or reads files of traces."""
    from millrace.cli.commands.trace import read_folder, read_gateway, show

    with plain_errors():
        if folder is None:
            show(read_gateway(url, api_key, wanted), html)
        else:
            show([read_folder(folder, wanted)], html)
