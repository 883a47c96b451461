"""Pier in Hugging Face's Trainer, TRL's trainers among them: `Trainer(..., callbacks=[PierCallback(...)])`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from pier.callback import SiteCallback


class PierCallback(SiteCallback, TrainerCallback):
    """Makes a Trainer a site of a run: see SiteCallback."""

    _told = 0
    """Lines of the Trainer's log that have been read."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **it: Any) -> None:  # noqa: ARG002
        """Join the run, with the model as the Trainer has wrapped it."""
        self._told = len(state.log_history)
        self._join(it["model"], it["optimizer"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:  # noqa: ARG002
        """Count an inner step; end the training when the run is over."""
        told = [row["loss"] for row in state.log_history[self._told :] if "loss" in row]
        self._told = len(state.log_history)
        if self._is_over(told[-1] if told else None):
            control.should_training_stop = True
