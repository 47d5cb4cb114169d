"""Prints the help of a command without parsing its options.

Typer loads pydantic even to parse an absent option, which would take most of the help's time.
"""

from __future__ import annotations

from collections.abc import Sequence

import typer
from typer.core import TyperGroup
from typer.main import get_command


def show_help(app: typer.Typer, words: Sequence[str]) -> None:
    """Prints the help of the command that `words` name, the words before --help; ends the process.

    Returns if they name no command, or if -- precedes --help: the parser then reports the error.
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
