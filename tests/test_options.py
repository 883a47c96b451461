from __future__ import annotations

import click
from click.testing import CliRunner

from pier_node.errors import PierError
from pier_node.model.presets import PRESETS
from pier_node.options import explained, preset


def test_an_error_is_explained_without_a_traceback() -> None:
    @click.command()
    @explained
    def fail() -> None:
        raise PierError("the pier is wet", "Wait for the sun.")

    failed = CliRunner().invoke(fail)
    assert (failed.exit_code, failed.output) == (1, "Error: the pier is wet\nWait for the sun.\n")


def test_a_model_is_chosen_by_its_name() -> None:
    @click.command()
    @preset("What it is for.")
    def choose(preset: str) -> None:
        click.echo(preset)

    for name in PRESETS:
        assert CliRunner().invoke(choose, ["--preset", name]).output == f"{name}\n"
    refused = CliRunner().invoke(choose, ["--preset", "llama-9t"])
    assert refused.exit_code == 2
    assert all(name in refused.output for name in PRESETS)
