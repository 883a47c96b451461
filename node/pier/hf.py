"""Pier in Hugging Face's Trainer, TRL's trainers among them: `Trainer(..., callbacks=[PierCallback(...)])`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from pier.callback import SiteCallback


class PierCallback(SiteCallback, TrainerCallback):
    """Makes a Trainer a site of a run: see SiteCallback."""

    def on_train_begin(self, *_: Any, **given: Any) -> None:
        """Join the run, with the model as the Trainer has wrapped it."""
        self._join(given["model"], given["optimizer"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:  # noqa: ARG002
        """Count an inner step; end the training when the run is over."""
        if self._is_over(next((row["loss"] for row in reversed(state.log_history) if "loss" in row), None)):
            control.should_training_stop = True
