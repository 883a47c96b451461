"""What the callbacks of trainers tell their site."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="the callback of Hugging Face's Trainer is NOT tested")

from transformers import TrainerControl, TrainerState, TrainingArguments

from pier.hf import PierCallback


class Told:
    """A site that notes the losses of its steps."""

    def __init__(self) -> None:
        self.losses: list[float | None] = []

    def step(self, loss: float | None) -> None:
        self.losses.append(loss)

    def close(self) -> None:
        pass


class Trained:
    """The callback of a Trainer, in a site that is a double."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.site, model = Told(), nn.Linear(2, 1)
        monkeypatch.setattr("pier.callback.join", lambda *_, **__: self.site)
        self._given: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
        self._callback, self._arguments = PierCallback(step_tokens=8), TrainingArguments(use_cpu=True)

    def tell(self, event: str, state: TrainerState) -> None:
        """What a Trainer calls."""
        getattr(self._callback, event)(self._arguments, state, TrainerControl(), **self._given)


def test_each_training_of_a_trainer_tells_the_losses_that_it_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Trained(monkeypatch)
    for first in (3.0, 2.0):
        state = TrainerState()  # as Trainer.train makes one
        trained.tell("on_train_begin", state)
        for loss in (first, first / 2):
            trained.tell("on_step_end", state)
            state.log_history.append({"loss": loss})
        trained.tell("on_step_end", state)
        trained.tell("on_train_end", state)
    assert trained.site.losses == [None, 3.0, 1.5, None, 2.0, 1.0]


def test_a_loss_from_before_a_resumed_training_is_not_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, resumed = Trained(monkeypatch), TrainerState(log_history=[{"loss": 9.0}])
    trained.tell("on_train_begin", resumed)
    trained.tell("on_step_end", resumed)
    assert trained.site.losses == [None]
