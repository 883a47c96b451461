from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from pier_node.cli import main

HEAVY = {"torch", "numpy", "grpc", "matplotlib", "rich", "pydantic", "aiohttp", "hivemind", "google", "psutil"}
HELP = """
import sys
from click.testing import CliRunner
from pier_node.cli import main
for words in ([], *([name] for name in main.commands)):
    assert CliRunner().invoke(main, [*words, "--help"]).exit_code == 0
print(*{name.partition(".")[0] for name in sys.modules})
"""
OPTIONS = [
    (name, parameter)
    for name, command in main.commands.items()
    for parameter in command.params
    if isinstance(parameter, click.Option) and not parameter.hidden
]


def test_help_imports_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    assert not HEAVY & set(done.stdout.split())


@pytest.mark.parametrize(("command", "option"), OPTIONS, ids=[f"{name} {option.opts[0]}" for name, option in OPTIONS])
def test_every_option_says_what_it_is_and_its_default(command: str, option: click.Option) -> None:
    assert option.help
    assert option.show_default or "[default: " in option.help, f"{command} {option.opts[0]}"


def test_the_list_of_commands_fits_80_columns_unabridged() -> None:
    shown = CliRunner().invoke(main, ["--help"], terminal_width=80).output
    listed = shown.partition("Commands:\n")[2]
    assert "..." not in listed
    assert {line.split()[0] for line in listed.splitlines()} == set(main.commands)
