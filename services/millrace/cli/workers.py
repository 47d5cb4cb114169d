"""The commands that run an instance: `millrace prefill`, `decode`, `colocated` and `kvp`."""

from __future__ import annotations

import importlib
from pathlib import Path

import typer

from millrace.cli.options import (
    ColocatedRole,
    Colocation,
    ConfigPath,
    DrainTimeout,
    Host,
    InstanceId,
    Model,
    ModelName,
    Node,
    Port,
    ReadyFd,
    Revision,
    SchedulerAddress,
    Settings,
    Stages,
    with_stages,
)
from millrace.cli.process import configure, run_async, tell

#: By name: the module that serves, and what help says of it.
_KINDS = {
    "prefill": (
        "millrace.prefill.main",
        "A prefill instance: computes prompts and pushes their KV to decode.",
    ),
    "decode": (
        "millrace.decode.main",
        "A decode instance: receives KV and generates tokens in batches.",
    ),
    "kvp": (
        "millrace.kvp.main",
        "A KVP worker: holds parts of long requests' KV and attends over them; loads no weights.",
    ),
}


def register(app: typer.Typer) -> None:
    """Adds them all."""
    for role, (module, summary) in _KINDS.items():
        _add(app, role, module, summary)
    app.command("colocated")(_colocated)


def _add(app: typer.Typer, role: str, module: str, summary: str) -> None:
    """Adds the command of a kind of worker: they take the same options."""

    @app.command(role, help=summary)
    def command(
        model: Model,
        model_name: ModelName = "",
        scheduler: SchedulerAddress = "127.0.0.1:7070",
        instance_id: InstanceId = "",
        host: Host = "127.0.0.1",
        port: Port = 0,
        node: Node = "",
        revision: Revision = "",
        drain_timeout_s: DrainTimeout = 30.0,
        stages: Stages = None,
        config: ConfigPath = None,
        settings: Settings = [],  # noqa: B006
        ready_fd: ReadyFd = None,
    ) -> None:
        serve = importlib.import_module(module).serve
        from millrace.instance.host import WorkerOptions

        if role == "kvp" and stages is not None:
            raise typer.BadParameter(
                "--stages is for instances with weights, which KVP workers lack"
            )
        tree = configure(config, with_stages(settings, stages), instance_id or role)
        options = WorkerOptions(
            model=model,
            model_name=model_name or Path(model).name,
            scheduler=scheduler,
            instance_id=instance_id,
            host=host,
            port=port,
            node=node,
            revision=revision,
            drain_timeout_s=drain_timeout_s,
        )
        run_async(serve(options, tree, tell(ready_fd)))


def _colocated(
    model: Model,
    model_name: ModelName = "",
    role: ColocatedRole = Colocation.PAIR,
    scheduler: SchedulerAddress = "127.0.0.1:7070",
    instance_id: InstanceId = "",
    host: Host = "127.0.0.1",
    port: Port = 0,
    node: Node = "",
    revision: Revision = "",
    drain_timeout_s: DrainTimeout = 30.0,
    stages: Stages = None,
    config: ConfigPath = None,
    settings: Settings = [],  # noqa: B006
    ready_fd: ReadyFd = None,
) -> None:
    """Prefill and decode in one process: as a pair of instances, or one that mixes its batches."""
    from millrace.colocated.main import serve
    from millrace.instance.host import WorkerOptions

    tree = configure(config, with_stages(settings, stages), instance_id or "colocated")
    options = WorkerOptions(
        model=model,
        model_name=model_name or Path(model).name,
        scheduler=scheduler,
        instance_id=instance_id,
        host=host,
        port=port,
        node=node,
        revision=revision,
        drain_timeout_s=drain_timeout_s,
    )
    run_async(serve(options, tree, tell(ready_fd), role=role))
