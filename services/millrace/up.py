"""`millrace up`: starts the whole stack on this machine, says how to use it, and stops it.

With `--autoscale` its pools of instances grow and shrink with the load.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from functools import partial
from pathlib import Path

from rich.console import Console

from millrace.profiler.first_start import profile_first
from millrace.service import die_with_parent
from millrace.stack import Stack, StackOptions
from millrace.stack_scaling import Scaling, autoscaled


async def run_until_stopped(options: StackOptions, scaling: Scaling | None = None) -> None:
    """`millrace up`: starts the stack, says how to use it, and stops it at SIGINT or SIGTERM."""
    console = Console(stderr=True)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    starting = asyncio.create_task(start_with_progress(options, console))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return
    stack = starting.result()
    try:
        print(usage(stack.url, options.model_name or Path(options.model).name))
        print(f"Logs: {stack.directory}. Ctrl-C stops everything.", flush=True)
        async with contextlib.AsyncExitStack() as around:
            if scaling is not None:
                told = partial(console.print, markup=False, highlight=False)
                await around.enter_async_context(autoscaled(stack, scaling, told))
            await stop.wait()
        console.print("Stopping: running answers finish first.")
    finally:
        stopping.cancel()
        await stack.stop()


async def start_with_progress(options: StackOptions, console: Console) -> Stack:
    """Starts a stack, saying what it does: a spinner on a terminal, lines elsewhere."""
    if options.profile is not None:
        arguments = [*options.common_arguments, *options.engine_settings("prefill")]
        await profile_first(options.model, options.profile, arguments, die_with_parent)
    with console.status("starting") as status:
        progress = status.update if console.is_terminal else console.print
        return await Stack(options, progress).__aenter__()


def usage(url: str, model_name: str) -> str:
    """The lines a new user tries first."""
    return f"""Millrace serves {model_name} at {url}

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
