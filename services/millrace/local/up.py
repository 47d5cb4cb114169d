"""`millrace up`: starts the whole stack on this machine, prints how to use it, and stops it.

With `--autoscale` its pools of instances grow and shrink with the load.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.text import Text

from millrace.concurrency import cancel, stop_event
from millrace.local.authority import as_toml
from millrace.local.checks import check_start
from millrace.local.first_start import profile_first
from millrace.local.options import StackOptions
from millrace.local.scaling import Scaling, autoscaled
from millrace.local.stack import Stack
from millrace.local.terminal import lasting
from millrace.wire.clients.scheduler_client import get_mechanisms
from millrace.wire.tls import use_tls

CPP_MODULES = ("millrace_kernels._cpu", "millrace.core.scheduler.planning._cdsp")


async def run_until_stopped(options: StackOptions, scaling: Scaling | None = None) -> None:
    """`millrace up`: starts the stack, says how to use it, and stops it at a stop signal."""
    console = Console(file=lasting(sys.stderr))
    say = partial(print, file=lasting(sys.stdout), flush=True)
    stop = stop_event()
    starting = asyncio.create_task(start_with_progress(options, console))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        await cancel(starting)
        if not starting.cancelled() and starting.exception() is None:
            await starting.result().stop()  # a library took the cancellation for its own
        return
    stack = starting.result()
    try:
        shown = ""
        if options.tls:
            use_tls(stack.tls)
            settings = stack.directory / "tls.toml"
            settings.write_text(as_toml(stack.tls), encoding="utf-8")
            shown = f" --config {settings}"
        for one in await get_mechanisms(stack.scheduler_address):
            console.print(str(one), markup=False, highlight=False, soft_wrap=True)
        names = [name or Path(model).name for model, name in options.models()]
        say(usage(stack.url, names))
        for address in stack.scheduler_addresses:
            say(f"Fleet: millrace fleet --scheduler {address}{shown}")
        for name, port in stack.metrics_ports.items():
            say(f"Metrics of {name}: http://127.0.0.1:{port}/metrics")
        say(f"Logs: {stack.directory}. Ctrl-C stops everything.")
        async with contextlib.AsyncExitStack() as around:
            if scaling is not None:
                report = partial(console.print, markup=False, highlight=False)
                await around.enter_async_context(autoscaled(stack, scaling, report))
            await stop.wait()
        console.print("Stopping: running answers finish first.")
    finally:
        stopping.cancel()
        await stack.stop()


async def start_with_progress(options: StackOptions, console: Console) -> Stack:
    """Starts a stack and shows the progress: a spinner on a terminal, lines elsewhere.

    Raises MillraceError, before anything is started if `check_start` finds the reason.
    """
    if missing := missing_cpp():
        console.print(
            f"Warning: Millrace is installed without its C++ modules ({', '.join(missing)}): torch "
            "and Python compute in their place, several times slower. Install a C++ compiler "
            "(Debian: apt-get install g++ make), then install Millrace again.",
            markup=False,
            highlight=False,
        )
    await check_start(options)
    await measure_first(options)
    with progress(console) as show:
        return await Stack(options, show).__aenter__()


@contextlib.contextmanager
def progress(console: Console) -> Iterator[Callable[[str], None]]:
    """Yields a function that shows a step of the start: by a spinner on a terminal, else as a line,
    which is never broken.
    """
    with console.status("starting") as status:
        if console.is_terminal:
            yield lambda step: status.update(Text(step))
        else:
            yield partial(console.print, markup=False, highlight=False, soft_wrap=True)


async def measure_first(options: StackOptions, budget_s: float = 0.0) -> None:
    """Measures the model as the stack's prefill instances compute, if it was never measured.

    budget_s: as in `profile_first`.
    """
    if options.profile is None:
        return
    for model, _ in options.models():
        await profile_first(
            model,
            options.profile,
            [*options.common_arguments, *options.engine_settings("prefill")],
            options.group_sizes,
            budget_s=budget_s,
        )


def missing_cpp() -> list[str]:
    """Returns the C++ modules that this installation lacks: it was made without a compiler."""
    return [name for name in CPP_MODULES if importlib.util.find_spec(name) is None]


def usage(url: str, model_names: Sequence[str]) -> str:
    """Returns the first commands for a new user."""
    model_name = model_names[0]
    return f"""Millrace serves {", ".join(model_names)} at {url}

curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{{
  "model": "{model_name}", "stream": true, "max_tokens": 64,
  "messages": [{{"role": "user", "content": "Tell me a story about a heron."}}]}}'

from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key="none")
answer = client.chat.completions.create(
    model="{model_name}", max_tokens=64,
    messages=[{{"role": "user", "content": "Who are you?"}}])
print(answer.choices[0].message.content)
"""
