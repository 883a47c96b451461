"""What the callbacks of all trainers share: joining a run, counting inner steps, leaving."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from pier_node.engine.client import Site, StopTraining
from pier_node.engine.join import join


class SiteCallback:
    """Makes a Trainer a site of a run. Give the Trainer as many `max_steps` as the run has inner steps, or more.

    Args:
        step_tokens: tokens of one optimizer step at this site, at most; the same at every site.
        options: of pier.join: config, peers, token_file, folder, …

    Attributes:
        site: from the beginning of the training on.
    """

    def __init__(self, step_tokens: int, **options: Any) -> None:
        self._step_tokens, self._options = step_tokens, options
        self.site: Site | None = None

    def _join(self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer]) -> None:
        self.site = join(model, optimizer, step_tokens=self._step_tokens, **self._options)

    def _is_over(self, loss: float | Tensor | None) -> bool:
        """Count an inner step; whether there is nothing more to train."""
        assert self.site is not None
        try:
            self.site.step(loss=loss)
        except StopTraining:
            return True
        return False

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Leave the run."""
        if self.site is not None:
            self.site.close()
