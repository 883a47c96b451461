"""Pier in Lightning: `Trainer(callbacks=[PierCallback(...)])`, with automatic or manual optimization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning import Callback, LightningModule, Trainer

from pier.callback import SiteCallback


class PierCallback(SiteCallback, Callback):
    """Makes a Trainer a site of a run: see SiteCallback."""

    _steps = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join the run, with the parameters and the optimizers that Lightning has made."""
        self._join(pl_module, trainer.optimizers)
        self._steps = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, _module: LightningModule, outputs: Any, *_: Any) -> None:
        """Count the optimizer's step, if this batch ended one; end the training when the run is over."""
        if trainer.global_step == self._steps:  # a micro-batch of an accumulated gradient
            return
        self._steps = trainer.global_step
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if self._is_over(None if loss is None else loss * trainer.accumulate_grad_batches):  # Lightning has divided it
            trainer.should_stop = True
