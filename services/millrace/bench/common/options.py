"""Makes the command of a benchmark from its settings, and runs it.

A benchmark's package has three modules: `command.py` with the settings, which imports no engine, so
that `--help` is fast; `run.py` with `run(settings, announce)`, which returns the document, or
`run(settings, on_progress)` where the steps are counted; `report.py` with `print_tables`, `draw`.
"""

from __future__ import annotations

import importlib
import inspect
import json as json_text
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from millrace.core.errors import PREFIX, MillraceError
from millrace.file_options import WRITE

if TYPE_CHECKING:
    from rich.console import Console

Document = dict[str, Any]
#: Takes the present step of a benchmark, as text.
Announce = Callable[[str], None]
T = TypeVar("T")

LESS = "A look, no figures to quote: less of everything."
DTYPES = ("float32", "bfloat16")


def option(
    default: T,
    flag: str,
    *,
    read: Callable[[str, str], Any] | None = None,
    kind: Any = None,  # noqa: ANN401 - a type or a union
    shown: str | None = None,
    **more: Any,  # noqa: ANN401 - as typer.Option has them
) -> T:
    """Declares a field of settings that is an option of the command.

    read(text, flag): reads the value from the option's text, or raises BadParameter. kind: of an
    option whose default is None. shown: the default as text, if not that of `default`.
    """
    if shown is None and isinstance(default, tuple):
        shown = ",".join(map(str, default))
    as_text = default if shown is None else shown
    declared = _declared(as_text, str if read else kind or type(default), flag, **more)
    reads = (lambda text: read(text, flag)) if read else _as_given
    made: T = field(default=default, metadata={"option": declared, "read": reads})
    return made


def _declared(default: object, kind: Any, flag: str, **more: Any) -> inspect.Parameter:  # noqa: ANN401
    """Returns a parameter of a function that typer makes a command of, without its name."""
    annotation = Annotated[kind, typer.Option(flag, **more)]
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter("option", keyword, default=default, annotation=annotation)


def _as_given(value: Any) -> Any:  # noqa: ANN401
    return value


def read_names(*known: str) -> Callable[[str, str], tuple[str, ...]]:
    """Reads comma-separated names without repeats."""

    def read(text: str, flag: str) -> tuple[str, ...]:
        found = [part.strip() for part in text.split(",")]
        if unknown := sorted(set(found) - set(known)):
            raise typer.BadParameter(f"{unknown[0]!r} is not one of {', '.join(known)}")
        return tuple(dict.fromkeys(found))

    return read


def read_numbers(*always: int) -> Callable[[str, str], tuple[int, ...]]:
    """Reads whole numbers above 0 and adds `always`; they ascend."""

    def read(text: str, flag: str) -> tuple[int, ...]:
        parts = text.split(",")
        if not all(part.isdecimal() and int(part) for part in parts):
            raise typer.BadParameter(f"{flag} {text!r}: write whole numbers with commas between")
        return tuple(sorted({*always, *map(int, parts)}))

    return read


def read_rates(text: str, flag: str) -> tuple[float, ...]:
    """Reads ascending numbers above 0, or none."""
    found = [math.nan]
    with suppress(ValueError):
        found = sorted(float(part) for part in text.split(",")) if text else []
    if not all(0.0 < rate < math.inf for rate in found):
        raise typer.BadParameter(f"{flag} {text!r}: write numbers above 0 with commas between")
    return tuple(found)


def read_seeds(text: str, flag: str) -> tuple[int, ...]:
    """Reads whole numbers without repeats."""
    with suppress(ValueError):
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    raise typer.BadParameter(f"{flag} {text!r}: write whole numbers with commas between")


def read_dtype(text: str, flag: str) -> str:
    """Reads the name of a dtype."""
    (name,) = read_names(*DTYPES)(text, flag)
    return name


def command(
    settings: type[Any],
    summary: str,
    *,
    json: str = "Write the report as JSON.",
    plot: str = "",
    quick: str = "",
) -> Callable[..., None]:
    """Returns the command of a benchmark: an option for each field that `option` declares.

    json, plot, quick: the help of these options; an option without help does not exist. With
    --quick, the settings are those of their method `quick`.
    """
    package = settings.__module__.rpartition(".")[0]
    given = {one.name: one.metadata for one in fields(settings) if one.metadata}

    def run(**values: Any) -> None:  # noqa: ANN401
        signature.bind_partial(**values)  # typer gives all, a test some
        asked = {name: one["read"](values[name]) for name, one in given.items() if name in values}
        chosen = settings(**asked)
        if values.get("quick"):
            chosen = chosen.quick()
        measure(package, chosen, values.get("json_path"), values.get("plot"))

    outputs = {
        "quick": _declared(False, bool, "--quick", help=quick),
        "json_path": _declared(None, Path | None, "--json", metavar="PATH", help=json, **WRITE),
        "plot": _declared(None, Path | None, "--plot", metavar="PATH", help=plot, **WRITE),
    }
    kept = {"quick": quick, "json_path": json, "plot": plot}
    declared = {name: one["option"] for name, one in given.items()}
    declared |= {name: one for name, one in outputs.items() if kept[name]}
    parameters = [one.replace(name=name) for name, one in declared.items()]
    signature = inspect.Signature(parameters)
    setattr(run, "__signature__", signature)  # noqa: B010 - typer reads it
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    run.__doc__ = summary
    return run


def progress_lines(console: Console) -> Announce:
    """Prints progress without a terminal: a line whenever another step begins, without its
    seconds.
    """
    last = ""

    def announce(what: str) -> None:
        nonlocal last
        begun = what.partition(" (")[0]
        if begun != last:
            last = begun
            console.print(begun)

    return announce


def measure(package: str, settings: object, json_path: Path | None, plot: Path | None) -> None:
    """Runs the benchmark of a package with its progress on stderr; shows and stores its report."""
    from rich.console import Console

    from millrace.tables import Output

    run: Any = importlib.import_module(f"{package}.run").run
    report: Any = importlib.import_module(f"{package}.report")
    console = Console(stderr=True)
    try:
        is_async = inspect.iscoroutinefunction(run)
        document = (_awaited if is_async else _counted)(run, settings, console)
    except MillraceError as error:
        console.print(f"{PREFIX}{error}", markup=False)
        raise typer.Exit(1) from None
    report.print_tables(document, Output())
    if json_path is not None:
        json_path.write_text(json_text.dumps(document, indent=2) + "\n")
    if plot is not None:
        report.draw(document, plot)


def _awaited(run: Any, settings: object, console: Console) -> Document:  # noqa: ANN401
    """Runs `run(settings, announce)` with the present step on the terminal."""
    import uvloop

    from millrace.concurrency import interruptible

    with console.status("starting") as status:
        announce = status.update if console.is_terminal else progress_lines(console)
        document: Document = uvloop.run(interruptible(run(settings, announce)))
    return document


def _counted(run: Any, settings: object, console: Console) -> Document:  # noqa: ANN401
    """Runs `run(settings, on_progress=...)` with a bar of the steps."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        bar = progress.add_task("starting", total=None)
        document: Document = run(
            settings,
            on_progress=lambda done, total, what: progress.update(
                bar, completed=done, total=total, description=what
            ),
        )
        progress.update(bar, completed=progress.tasks[bar].total, description="done")
    return document
