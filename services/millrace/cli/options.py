"""Options that several commands of the command line share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from millrace.file_options import READ, WRITE

_MOST_PORT = 65535

Settings = Annotated[
    list[str],
    typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Override one setting; repeatable."),
]
ConfigPath = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="TOML file of settings.", **READ)
]
ReadyFd = Annotated[
    int | None,
    typer.Option(
        "--ready-fd", hidden=True, help="File descriptor that gets the port when serving."
    ),
]
Model = Annotated[
    str,
    typer.Option(
        "--model", metavar="FOLDER|HUB-ID", help="Hugging Face model folder, or a hub id."
    ),
]
ModelOrFile = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="FOLDER|HUB-ID",
        help="Hugging Face model folder, or a hub id; without it the setting proxy.models_file.",
    ),
]
ModelOrShipped = Annotated[
    str, typer.Option("--model", metavar="FOLDER|HUB-ID", help="Default: the shipped model.")
]
ModelName = Annotated[
    str,
    typer.Option("--model-name", help="Model name for clients. Default: the folder's name."),
]
ModelsOrShipped = Annotated[
    list[str],
    typer.Option(
        "--model",
        metavar="FOLDER|HUB-ID",
        help="Default: the shipped model. Repeatable: every model gets instances of its own.",
    ),
]
ModelNames = Annotated[
    list[str],
    typer.Option(
        "--model-name", help="Model name for clients, a name per model. Default: the folder's name."
    ),
]


def _addresses(text: str) -> str:
    """Raises BadParameter unless every address has a port: gRPC would take port 443."""
    for one in text.split(","):
        host, _, port = one.strip().rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) <= _MOST_PORT:
            raise typer.BadParameter(f"{one!r}: write HOST:PORT, PORT from 1 to {_MOST_PORT}")
    return text


SchedulerAddress = Annotated[
    str,
    typer.Option(
        "--scheduler",
        metavar="HOST:PORT[,...]",
        callback=_addresses,
        help="The scheduler's address. Of several, any finds the one that leads.",
    ),
]
GatewayUrl = Annotated[str, typer.Option("--url", help="The gateway.")]
ApiKey = Annotated[
    str, typer.Option("--api-key", envvar="MILLRACE_API_KEY", help="Sent as a bearer token.")
]
Advertise = Annotated[
    str,
    typer.Option(
        "--advertise",
        metavar="HOST[:PORT]",
        help="Where proxies and instances reach this scheduler. Default: --host and its port.",
    ),
]
Record = Annotated[
    Path | None,
    typer.Option(
        "--record",
        metavar="FILE",
        envvar="MILLRACE_RECORD",
        help="Record the run for `millrace board`, `report` and `sim replay`.",
        **WRITE,
    ),
]
Host = Annotated[str, typer.Option("--host", help="Address to listen on.")]
Port = Annotated[
    int,
    typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 picks a free one."),
]
GatewayHost = Annotated[
    str | None, typer.Option("--host", help="Address to listen on. Default: proxy.host.")
]
GatewayPort = Annotated[
    int | None,
    typer.Option(
        "--port",
        min=0,
        max=65535,
        help="Port to listen on; 0 picks a free one. Default: proxy.port.",
    ),
]
InstanceId = Annotated[
    str, typer.Option("--id", help="Name of this instance. Default: a random name.")
]
Node = Annotated[
    str,
    typer.Option(
        "--node",
        envvar="MILLRACE_NODE",
        help="Node of the instance: SP groups prefer one node. Default: the host's name.",
    ),
]
Revision = Annotated[
    str,
    typer.Option("--revision", help="Model revision: instances of two revisions exchange no KV."),
]
DrainTimeout = Annotated[
    float,
    typer.Option("--drain-timeout-s", min=0.0, help="Time for open requests at shutdown."),
]
Stages = Annotated[
    int | None,
    typer.Option("--stages", min=1, help="Pipeline stages of an instance, as engine.stages."),
]
PrefillSizes = Annotated[
    str,
    typer.Option("--prefill", metavar="N|LOW:HIGH", help="Default: 2; with --autoscale 1:4."),
]
DecodeSizes = Annotated[
    str,
    typer.Option("--decode", metavar="N|LOW:HIGH", help="Default: 1; with --autoscale 1:2."),
]


class Colocation(StrEnum):
    """How prefill and decode share a process."""

    PAIR = "pair"
    MIXED = "mixed"


ColocatedRole = Annotated[
    Colocation,
    typer.Option(
        "--role",
        help="pair: a prefill and a decode instance that share weights; mixed: one instance whose "
        "batches hold answers and chunks of prompts.",
    ),
]
Schedulers = Annotated[
    int,
    typer.Option("--schedulers", min=1, max=9, help="Schedulers: one leads, the others stand by."),
]
KvpSize = Annotated[
    int,
    typer.Option("--kvp", min=0, help="KVP workers, which hold shards of long requests' KV."),
]
Devices = Annotated[
    str,
    typer.Option(
        "--devices",
        metavar="0,1,...",
        help="GPUs for the instances, one GPU each. Default: all visible GPUs.",
    ),
]
ShareDevices = Annotated[
    bool,
    typer.Option("--share-devices", help="Let instances share GPUs and split their memory."),
]
Autoscale = Annotated[
    bool, typer.Option("--autoscale", help="Scale pools from LOW to HIGH with the load.")
]
ScaleToZero = Annotated[
    bool,
    typer.Option(
        "--scale-to-zero", help="As --autoscale, and idle pools go to zero: the next request waits."
    ),
]
MaxChunkTokens = Annotated[
    int | None,
    typer.Option("--max-chunk-tokens", min=1, help="As engine.max_chunk_tokens."),
]
NoProfile = Annotated[
    bool,
    typer.Option("--no-profile", help="Do not measure an unmeasured model at the start."),
]
JsonAnswer = Annotated[
    Path | None,
    typer.Option("--json", metavar="PATH", help="Write the result as JSON, too.", **WRITE),
]


def with_address(settings: list[str], host: str | None, port: int | None) -> list[str]:
    """Returns the settings, with the values of the gateway's `--host` and `--port` if given."""
    given = {"proxy.host": host, "proxy.port": port}
    return [*settings, *(f"{name}={value}" for name, value in given.items() if value is not None)]


def with_stages(settings: list[str], stages: int | None) -> list[str]:
    """Returns the settings, with the value of `--stages` if it was given."""
    return settings if stages is None else [*settings, f"engine.stages={stages}"]
