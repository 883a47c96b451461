"""Metrics of a program's own: what it may log, and what of it waits to be told to the daemon.

What does not fit the bounds never leaves the program: it is left out, with a warning. The daemon relies on no program
to keep them: a message that does not is no message.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter

MOST = 64
"""Most names that a site has metrics of."""
WORDS = 200
"""Longest text in characters."""
NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.: -]{0,63}(/[A-Za-z0-9_][A-Za-z0-9_.: -]{0,63}){0,3}$"
"""Parts with slashes between them, as trackers group them; MLflow and TensorBoard take no other characters."""

Value = Annotated[float, Field(allow_inf_nan=False)] | Annotated[str, Field(max_length=WORDS)]
Metrics = Annotated[dict[Annotated[str, Field(pattern=NAME)], Value], Field(max_length=MOST)]
"""Finite numbers and short texts, by name."""

_METRICS: TypeAdapter[dict[str, float | str]] = TypeAdapter(Metrics, config=ConfigDict(strict=True))
_FITS = (
    f"it takes finite numbers and texts of at most {WORDS} characters, with names of letters, digits, '_', '.', ':', "
    "'-' and spaces, of at most four parts with '/' between them"
)

log = logging.getLogger(__name__)


def newest(before: Mapping[str, float | str], later: Mapping[str, float | str]) -> dict[str, float | str]:
    """The last value of each name; of more than MOST names those that were logged last."""
    kept = {name: value for name, value in before.items() if name not in later}
    return dict([*kept.items(), *later.items()][-MOST:])


class Waiting:
    """What a program has logged and the daemon has not heard yet.

    Attributes:
        step: inner steps of the run that were done when the last of it was logged.
    """

    def __init__(self) -> None:
        self.step = 0
        self._metrics: dict[str, float | str] = {}
        self._warned: set[str] = set()

    def add(self, metrics: Mapping[str, Any], step: int) -> None:
        """Add what fits; warn once of each name that does not, or whose value does not."""
        fitting: dict[str, float | str] = {}
        for name, value in metrics.items():
            try:
                fitting |= _METRICS.validate_python({name: value if isinstance(value, str) else float(value)})
            except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several values
                self._warn(repr(name)[:WORDS], repr(value)[:WORDS])
        self._metrics, self.step = newest(self._metrics, fitting), step

    def take(self) -> dict[str, float | str]:
        """All of it; afterwards nothing waits."""
        taken, self._metrics = self._metrics, {}
        return taken

    def _warn(self, name: str, value: str) -> None:
        if name not in self._warned and len(self._warned) < MOST:
            self._warned.add(name)
            log.warning("site.log leaves out %s: %s: %s", name, value, _FITS)
