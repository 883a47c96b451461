"""Options that several commands of pier-coordinator share."""

from __future__ import annotations

from pathlib import Path

import click

FOLDER = click.option(
    "--data",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("."),
    help="Folder of the run, created by `init`. [default: this folder]",
)
HOURS = {"m": 60.0, "h": 3600.0, "d": 86400.0}


class Duration(click.ParamType[float]):
    """A duration such as 90m, 24h or 7d, converted to seconds."""

    name = "TIME"

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Convert to seconds; fail with a message that says what is allowed."""
        if isinstance(value, float):
            return value
        number, unit = value[:-1], value[-1:]
        if unit not in HOURS or not number.isdigit() or not int(number):
            self.fail(f"{value!r} is not a duration: write 30m, 24h or 7d", param, ctx)
        return int(number) * HOURS[unit]
