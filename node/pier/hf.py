"""Pier in Hugging Face's Trainer, TRL's trainers among them: `Trainer(..., callbacks=[PierCallback(...)])`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from pier_node.engine.client import Site, StopTraining
from pier_node.engine.join import join


class PierCallback(TrainerCallback):
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

    def on_train_begin(self, *_: Any, **given: Any) -> None:
        """Join the run, with the model as the Trainer has wrapped it."""
        self.site = join(given["model"], given["optimizer"], step_tokens=self._step_tokens, **self._options)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:  # noqa: ARG002
        """Count an inner step; end the training when the run is over."""
        assert self.site is not None
        try:
            self.site.step(loss=next((row["loss"] for row in reversed(state.log_history) if "loss" in row), None))
        except StopTraining:
            control.should_training_stop = True

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Leave the run."""
        if self.site is not None:
            self.site.close()
