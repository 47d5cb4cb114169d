"""The commands that run an instance: `millrace prefill`, `decode`, `colocated` and `kvp`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path

import typer

from millrace.cli import options as of
from millrace.cli.process import configure, run_async, tell

#: The serving module and the help's summary, by command.
_COMMANDS = {
    "prefill": (
        "millrace.prefill.main",
        "Run a prefill instance: it computes prompts and pushes their KV to decode.",
    ),
    "decode": (
        "millrace.decode.main",
        "Run a decode instance: it receives KV and generates tokens in batches.",
    ),
    "kvp": (
        "millrace.kvp.main",
        "Run a KVP worker: it holds shards of long requests' KV and computes attention over them.",
    ),
    "colocated": (
        "millrace.colocated.main",
        "Run prefill and decode in one process: a pair of instances, or one mixed instance.",
    ),
}


def register(app: typer.Typer) -> None:
    """Adds the commands of all kinds of instances."""
    for name, (module, summary) in _COMMANDS.items():
        app.command(name, help=summary)(_command(name, module))


def _command(name: str, module: str) -> Callable[..., None]:
    """Returns the function of one command. All have the same options; colocated also has --role."""

    def command(
        model: of.Model,
        model_name: of.ModelName = "",
        role: of.ColocatedRole = of.Colocation.PAIR,
        scheduler: of.SchedulerAddress = "127.0.0.1:7070",
        instance_id: of.InstanceId = "",
        host: of.Host = "127.0.0.1",
        port: of.Port = 0,
        node: of.Node = "",
        revision: of.Revision = "",
        drain_timeout_s: of.DrainTimeout = 30.0,
        stages: of.Stages = None,
        config: of.ConfigPath = None,
        settings: of.Settings = [],  # noqa: B006
        ready_fd: of.ReadyFd = None,
    ) -> None:
        if name == "kvp" and stages is not None:
            raise typer.BadParameter(
                "--stages is for instances with weights, which KVP workers lack"
            )
        tree = configure(config, of.with_stages(settings, stages), instance_id or name)
        serve = importlib.import_module(module).serve  # imports torch: after what may be refused
        from millrace.instance.host import WorkerOptions

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
        of_its_own = {"role": role} if name == "colocated" else {}
        run_async(serve(options, tree, tell(ready_fd), **of_its_own))

    if name != "colocated":
        _hide(command, "role")
    return command


def _hide(command: Callable[..., None], option: str) -> None:
    """Removes an option of a command: typer reads the options from the signature."""
    signature = inspect.signature(command, eval_str=True)
    kept = [one for one in signature.parameters.values() if one.name != option]
    setattr(command, "__signature__", signature.replace(parameters=kept))  # noqa: B010
