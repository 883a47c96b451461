"""The optimizers of a site's program: their state, which never leaves the site, on its way to the disk and back."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

log = logging.getLogger(__name__)


class Optimizers:
    """The state of optimizers, which a restarted program finds again by the kind of each and the names of parameters.

    Args:
        own: none: nothing is kept.
        parameters: those that sites share, by name.
    """

    def __init__(self, own: Sequence[Optimizer], parameters: Mapping[str, Tensor]) -> None:
        self._own, self._called = own, {id(parameter): name for name, parameter in parameters.items()}

    def forget(self) -> None:
        """Begin without a state."""
        for optimizer in self._own:
            optimizer.state.clear()

    def keep(self, file: Path) -> None:
        """Write the state to the disk; a disk that fails is a warning."""
        if not self._own:
            return
        part = file.with_suffix(".part")
        kept = [
            {"kind": _kind(optimizer), "names": self._names(optimizer), "state": optimizer.state_dict()}
            for optimizer in self._own
        ]
        try:
            part.parent.mkdir(parents=True, exist_ok=True)  # on another machine than the daemon's, the first time
            with part.open("wb") as opened:  # by a path of its own it raises RuntimeError when the disk is full
                torch.save(kept, opened)
            part.replace(file)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            log.warning("the optimizer's state is not kept: %s: %s", part, error.strerror)

    def restore(self, file: Path) -> None:
        """Take the state from the disk; what the program says of rates and decay stays."""
        if not (self._own and file.exists()):
            return
        try:
            kept = torch.load(file, weights_only=True)
            for place, optimizer in enumerate(self._own):
                state = self._found(optimizer, kept[place : place + 1] + kept)
                groups = optimizer.state_dict()["param_groups"]
                optimizer.load_state_dict({"state": state, "param_groups": groups})
        except Exception as error:  # whatever is wrong with it, the site can go on without
            log.warning("the optimizer starts again: %s cannot be used: %s", file, error)

    def _found(self, optimizer: Optimizer, kept: Sequence[Mapping[str, Any]]) -> dict[Any, Any]:
        """What was kept of an optimizer, or by others of its kind of its parameters."""
        alike = [each for each in kept if each["kind"] == _kind(optimizer)]
        if not alike:
            raise ValueError(f"it has none of {_kind(optimizer)}")
        now = self._names(optimizer)
        for each in alike:
            if each["names"] == now:
                return dict(each["state"]["state"])
        by_name = {
            name: each["state"]["state"][place]
            for each in alike
            for place, name in enumerate(each["names"])
            if name and place in each["state"]["state"]
        }
        return {place: by_name[name] for place, name in enumerate(now) if name in by_name}

    def _names(self, optimizer: Optimizer) -> list[str]:
        """What its parameters are called, in the order of its state; "": they are not shared."""
        return [self._called.get(id(own), "") for group in optimizer.param_groups for own in group["params"]]


def _kind(optimizer: Optimizer) -> str:
    return type(optimizer).__name__
