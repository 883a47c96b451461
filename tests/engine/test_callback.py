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


def test_each_training_of_a_trainer_tells_the_losses_that_it_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Told()
    monkeypatch.setattr("pier.callback.join", lambda *_, **__: site)
    model = nn.Linear(2, 1)
    given: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    callback, arguments, control = PierCallback(step_tokens=8), TrainingArguments(use_cpu=True), TrainerControl()
    for first in (3.0, 2.0):
        state = TrainerState()  # as Trainer.train makes one
        callback.on_train_begin(arguments, state, control, **given)
        for loss in (first, first / 2):
            callback.on_step_end(arguments, state, control, **given)
            state.log_history.append({"loss": loss})
        callback.on_step_end(arguments, state, control, **given)
        callback.on_train_end(arguments, state, control, **given)
    assert site.losses == [None, 3.0, 1.5, None, 2.0, 1.0]


def test_a_loss_from_before_a_resumed_training_is_not_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Told()
    monkeypatch.setattr("pier.callback.join", lambda *_, **__: site)
    model = nn.Linear(2, 1)
    given: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    callback, arguments, control = PierCallback(step_tokens=8), TrainingArguments(use_cpu=True), TrainerControl()
    resumed = TrainerState(log_history=[{"loss": 9.0}])
    callback.on_train_begin(arguments, resumed, control, **given)
    callback.on_step_end(arguments, resumed, control, **given)
    assert site.losses == [None]
