"""Prints the help of a command without parsing its options.

Typer loads pydantic to parse even the absence of an option: most of the time that help would take.
"""

from __future__ import annotations

from collections.abc import Sequence

import typer
from typer.core import TyperGroup
from typer.main import get_command


def show_help(app: typer.Typer, words: Sequence[str]) -> None:
    """Prints the help of the command that `words`, those before --help, name; ends the process.

    Returns where they name none, or where -- precedes --help: the parser says what is wrong.
    """
    command = get_command(app)
    context = command.context_class(command, info_name=app.info.name)
    for word in words:
        if word == "--":
            return
        if not isinstance(command, TyperGroup):
            break
        if word not in command.commands:
            return
        command = command.commands[word]
        context = command.context_class(command, info_name=word, parent=context)
    print(command.get_help(context))
    raise SystemExit(0)
