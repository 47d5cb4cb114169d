"""The command `millrace-operator`: its options and its exit.

Its work is imported when it begins: `--help` and a wrong option cost little.
"""

from __future__ import annotations

import logging
import os
import socket
import uuid
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from millrace.core.errors import MillraceError

log = logging.getLogger(__name__)

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,  # loading rich takes longer than all of --help
    pretty_exceptions_enable=False,
)


@app.command()
def run(  # noqa: PLR0913 - a command's options are its arguments
    namespace: Annotated[
        list[str],
        typer.Option(metavar="NAME", help="Look after this namespace only; repeat for several."),
    ] = [],  # noqa: B006 - typer wants a literal default
    lease_namespace: Annotated[
        str, typer.Option(metavar="NAME", help="Of the Lease; default: $POD_NAMESPACE.")
    ] = "",
    lease_name: Annotated[
        str, typer.Option(metavar="NAME", help="Operators of one name take turns.")
    ] = "millrace-operator",
    scheduler_address: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Of schedulers, with {service} and {namespace}; for an operator that runs where "
            "the cluster's names are unknown. Default: their names in the cluster.",
        ),
    ] = "",
    metrics_port: Annotated[
        int, typer.Option(metavar="PORT", help="Of /metrics, /health and /ready; 0: a free one.")
    ] = 9090,
    log_format: Annotated[str, typer.Option(metavar="text|json")] = "json",
    log_level: Annotated[str, typer.Option(metavar="debug|info|warning|error")] = "info",
    kubeconfig: Annotated[
        str, typer.Option(metavar="FILE", help="Default: the pod's service account.")
    ] = "",
    context: Annotated[str, typer.Option(metavar="NAME", help="Of the kubeconfig.")] = "",
) -> None:
    """The operator: builds, scales and drains what ModelServices and their pools ask for."""
    import asyncio

    from millrace_operator.environment import defaults_from, use_settings_of
    from millrace_operator.run import cluster
    from millrace_operator.run.crds import read_crds
    from millrace_operator.run.kube import load_configuration
    from millrace_operator.run.operator import Options, serve

    environment = os.environ
    try:
        use_settings_of(environment, log_format=log_format, log_level=log_level)
        crds = environment.get("MILLRACE_CRDS", "")
        pod = environment.get("POD_NAME") or socket.gethostname()
        options = Options(
            configuration=partial(load_configuration, kubeconfig, context),
            defaults=defaults_from(environment),
            namespaces=tuple(namespace),
            lease_namespace=lease_namespace or environment.get("POD_NAMESPACE", "default"),
            lease_name=lease_name,
            identity=f"{pod}_{uuid.uuid4()}",  # a restarted container has another name
            metrics_port=metrics_port,
            crds=tuple(read_crds(Path(crds))) if crds else (),
            address=partial(_filled_in, scheduler_address)
            if scheduler_address
            else cluster.scheduler_address,
        )
        asyncio.run(serve(options))
    except MillraceError as error:
        log.error("%s", error)
        raise typer.Exit(1) from None


def _filled_in(address: str, namespace: str, service: str) -> str:
    return address.format(namespace=namespace, service=service)


def main() -> None:
    app()
