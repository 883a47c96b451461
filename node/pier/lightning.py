"""Pier in Lightning: `Trainer(callbacks=[PierCallback(...)])`, with automatic or manual optimization."""

from __future__ import annotations

from typing import Any

from lightning import Callback, LightningModule, Trainer

from pier_node.engine.client import Site, StopTraining
from pier_node.engine.join import join


class PierCallback(Callback):
    """Makes a Trainer a site of a run. Give it as many `max_steps` as the run has inner steps, or more.

    Args:
        step_tokens: tokens of one optimizer step at this site, at most; the same at every site.
        options: of pier.join: config, peers, token_file, folder, …

    Attributes:
        site: from the beginning of the training on.
    """

    def __init__(self, step_tokens: int, **options: Any) -> None:
        self._step_tokens, self._options = step_tokens, options
        self.site: Site | None = None
        self._steps = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join the run, with the parameters and the optimizer that Lightning has made."""
        self.site = join(pl_module, trainer.optimizers[0], step_tokens=self._step_tokens, **self._options)
        self._steps = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Count the optimizer's step, if this batch ended one; end the training when the run is over."""
        if trainer.global_step == self._steps:  # a micro-batch of an accumulated gradient
            return
        self._steps = trainer.global_step
        assert self.site is not None
        loss = trainer.callback_metrics.get("loss", trainer.callback_metrics.get("train_loss"))
        try:
            self.site.step(loss=loss)
        except StopTraining:
            trainer.should_stop = True

    def on_train_end(self, *_: Any) -> None:
        """Leave the run."""
        if self.site is not None:
            self.site.close()
