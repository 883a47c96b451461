"""The help of every command fits a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from pier_coordinator.cli import main as coordinator
from pier_node.cli import main as node


def pages(command: click.Command, context: click.Context) -> Iterator[str]:
    yield command.get_help(context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from pages(below, click.Context(below, info_name=name, parent=context))


@pytest.mark.parametrize("command", [node, coordinator])
def test_help_fits_eighty_columns(command: click.Group) -> None:
    context = click.Context(command, info_name="pier", terminal_width=80)
    assert [line for page in pages(command, context) for line in page.splitlines() if len(line) > 80] == []
