from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from pier_node.base.shared import SharedVector
from pier_node.config.run import InnerSection, ModelSection, RunConfig
from pier_node.trainer import replica as module
from pier_node.trainer.data.corpus import Windows
from pier_node.trainer.data.tokens import ByteTokenizer
from pier_node.trainer.model.decoder import Block, Decoder
from pier_node.trainer.model.initial import initial_weights
from pier_node.trainer.replica import Replica, mean_gradient

BATCH = 4


def _train(replica: Replica, windows: Windows, steps: range) -> list[float]:
    return [replica.train(step, windows.batch(step, BATCH), BATCH).item() for step in steps]


def _state(replica: Replica) -> Tensor:
    """Weights and both moments, [3, parameters]."""
    state = torch.empty(3, replica.layout.length)
    replica.store_weights(state[0])
    replica.store_moments(state[1], state[2])
    return state


def test_weights_come_and_go_unchanged(replica: Replica, weights: SharedVector) -> None:
    stored = torch.empty(replica.layout.length)
    replica.store_weights(stored)
    assert torch.equal(stored, torch.from_numpy(weights.array))


def test_training_lowers_the_loss_and_counts_its_steps(replica: Replica, windows: Windows) -> None:
    losses = _train(replica, windows, range(30))
    assert losses[0] == pytest.approx(5.55, abs=0.1)  # ln 256: the model knows nothing yet
    assert losses[-1] < losses[0] - 1.0
    assert replica.adam_step == 30


def test_a_run_in_two_parts_has_the_bits_of_a_straight_one(
    replica: Replica, config: RunConfig, windows: Windows
) -> None:
    _train(replica, windows, range(3))
    middle = _state(replica)
    _train(replica, windows, range(3, 6))
    other = Replica(config, torch.device("cpu"), 1)
    other.load_weights(middle[0])
    other.load_moments(middle[1], middle[2], 3)
    _train(other, windows, range(3, 6))
    assert torch.equal(_state(other), _state(replica))
    assert other.adam_step == 6


def test_a_sample_is_short_printable_and_always_of_the_same_dice(
    replica: Replica, windows: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SAMPLE_SECONDS", math.inf)
    untrained = replica.sample(ByteTokenizer(), 20)
    assert len(untrained) <= 20
    assert all(letter.isprintable() or letter in "\n\t" for letter in untrained)
    assert replica.sample(ByteTokenizer(), 20) == untrained
    before = _state(replica)
    _train(replica, windows, range(3))
    trained = _state(replica)
    assert replica.sample(ByteTokenizer(), 200) != untrained
    replica.load_weights(before[0])
    assert replica.sample(ByteTokenizer(), 20) == untrained
    replica.load_weights(trained[0])
    assert torch.equal(_state(replica), trained), "writing changes nothing"


def test_a_sample_that_takes_too_long_is_cut(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLE_SECONDS", -1.0)
    assert len(replica.sample(ByteTokenizer(), 200)) == 1


def test_loading_moments_replaces_those_that_were_there(replica: Replica, windows: Windows) -> None:
    start = _state(replica)
    _train(replica, windows, range(2))
    straight = _state(replica)
    replica.load_weights(start[0])
    replica.load_moments(start[1], start[2], 0)
    _train(replica, windows, range(2))
    assert torch.equal(_state(replica), straight)


def test_with_a_document_mask_training_and_evaluation_keep_documents_apart(
    config: RunConfig, weights: SharedVector, tmp_path: Path
) -> None:
    words = {f"w{number}": number for number in range(255)} | {"</s>": 255}
    library = Tokenizer(WordLevel(words, unk_token="w0"))
    library.save(str(tmp_path / "tokenizer.json"))
    data = {"tokenizer": str(tmp_path / "tokenizer.json"), "document_mask": True}
    masked = config.model_copy(update={"data": config.data.model_copy(update=data)})
    flat, (plain, apart) = (
        torch.from_numpy(weights.array),
        [Replica(run, torch.device("cpu"), 1) for run in (config, masked)],
    )
    rows = np.tile(np.array([*range(8), 255, *range(7), 9]), (BATCH, 1))
    batch, alone = (rows[:, :-1], rows[:, 1:]), (rows[:, 8:-1], rows[:, 9:])
    whole = apart.evaluate(flat, [batch])
    parts = [plain.evaluate(flat, [(batch[0][:, :8], batch[1][:, :8])]), plain.evaluate(flat, [alone])]
    assert whole == pytest.approx(sum(parts) / 2, rel=1e-4)
    assert whole != pytest.approx(plain.evaluate(flat, [batch]), rel=1e-4)
    assert apart.gradient(batch, BATCH).item() == pytest.approx(whole, rel=1e-4)


def test_a_gradient_steps_nothing(replica: Replica, windows: Windows) -> None:
    before, gradient = _state(replica), torch.zeros(replica.layout.length)
    replica.gradient(windows.batch(0, BATCH), BATCH)
    replica.store_gradient(gradient)
    assert torch.equal(_state(replica), before)
    assert gradient.norm() > 0.1
    assert replica.adam_step == 0


def test_the_gradient_of_what_took_no_part_in_a_step_is_zero(
    replica: Replica, windows: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradient, whole = torch.full((replica.layout.length,), torch.nan), Decoder.through

    def without_first(self: Decoder, x: Tensor, **how: Any) -> Tensor:
        return whole(self, x, **how | {"without": {0}})

    monkeypatch.setattr(Decoder, "through", without_first)
    replica.gradient(windows.batch(0, BATCH), BATCH)
    replica.store_gradient(gradient)
    assert gradient.isfinite().all()
    assert not replica.layout.views(gradient)["blocks.0.mlp.down.weight"].any()


def test_evaluation_is_of_the_given_weights_and_touches_no_moments(
    replica: Replica, config: RunConfig, windows: Windows
) -> None:
    _train(replica, windows, range(30))
    trained = _state(replica)
    validation = windows.validation(2, BATCH)
    untrained = replica.evaluate(initial_weights(config.model, 9), validation)
    assert replica.evaluate(trained[0], validation) < untrained - 1.0
    assert torch.equal(_state(replica), trained)


@pytest.mark.gpu
def test_rounds_take_no_more_device_memory_than_steps(configure: Callable[..., RunConfig], windows: Windows) -> None:
    config = configure()
    device = torch.device("cuda", 0)
    replica = Replica(config, device, 1)
    vectors = torch.zeros(3, replica.layout.length)
    vectors[0] = initial_weights(config.model, 1)

    def peak(act: Callable[[], object]) -> int:
        torch.cuda.reset_peak_memory_stats(device)
        act()
        return torch.cuda.max_memory_allocated(device)

    replica.load_weights(vectors[0])
    replica.train(0, windows.batch(0, BATCH), BATCH)
    step = peak(lambda: replica.train(1, windows.batch(1, BATCH), BATCH))
    assert peak(lambda: replica.store_weights(vectors[0])) <= step
    assert peak(lambda: replica.store_moments(vectors[1], vectors[2])) <= step
    assert peak(lambda: replica.load_weights(vectors[0])) <= step
    assert peak(lambda: replica.load_moments(vectors[1], vectors[2], 2)) <= step
    assert peak(lambda: replica.evaluate(vectors[0], windows.validation(1, BATCH))) <= step


@pytest.mark.parametrize("wanted", [True, False])
def test_each_block_is_compiled_when_the_run_says_so(
    configure: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    compiled: list[object] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compiled.append(module))
    Replica(configure(compile=wanted), torch.device("cpu"), 1)
    assert len(compiled) == 2 * wanted  # llama-tiny has two blocks


@pytest.mark.parametrize("form", ["llama", "gpt2"])
def test_the_residual_stream_is_bf16_by_choice(
    form: str, configure: Callable[..., RunConfig], windows: Windows
) -> None:
    seen: dict[str, set[torch.dtype]] = {}
    losses: dict[str, list[float]] = {}
    for name, inner in {
        "fp32": {"precision": "fp32", "residual_stream": "bf16"},  # which says nothing of steps in fp32
        "auto": {"precision": "bf16"},
        "bf16": {"precision": "bf16", "residual_stream": "bf16"},
    }.items():
        config = configure(**inner)
        model = ModelSection.model_validate({**config.model.model_dump(exclude={"transformers"}), "form": form})
        replica = Replica(config.model_copy(update={"model": model}), torch.device("cpu"), 1)
        replica.load_weights(initial_weights(model, seed=1))
        kinds = seen.setdefault(name, set())

        def look(module: torch.nn.Module, _: object, out: object, kinds: set[torch.dtype] = kinds) -> None:
            if isinstance(module, Block) and isinstance(out, Tensor):
                kinds.add(out.dtype)

        with torch.nn.modules.module.register_module_forward_hook(look):
            losses[name] = _train(replica, windows, range(50))
    assert seen == {"fp32": {torch.float32}, "auto": {torch.float32}, "bf16": {torch.bfloat16}}
    assert losses["bf16"] != losses["auto"]
    for name in ("auto", "bf16"):
        assert np.mean(losses[name][-10:]) == pytest.approx(np.mean(losses["fp32"][-10:]), rel=0.01)


CONFIG = ModelSection(preset="llama-tiny", context=16)


@pytest.fixture
def model() -> Decoder:
    torch.manual_seed(1)
    return Decoder(CONFIG)


@pytest.fixture
def rows() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(256, (5, 17), generator=torch.Generator().manual_seed(2))
    return tokens[:, :-1], tokens[:, 1:]


def _gradients(model: Decoder) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("micro_batch", [0, 1, 2, 5, 9])
def test_gradient_and_loss_are_those_of_the_mean(model: Decoder, rows: tuple[Tensor, Tensor], micro_batch: int) -> None:
    loss = F.cross_entropy(model(rows[0]).flatten(0, 1), rows[1].flatten())
    torch.autograd.backward(loss)
    expected = _gradients(model)
    computed = mean_gradient(model, *rows, len(rows[0]), InnerSection(micro_batch=micro_batch), bf16=False)
    torch.testing.assert_close(computed, loss.detach())
    torch.testing.assert_close(_gradients(model), expected, rtol=1e-4, atol=1e-7)


def test_a_batch_of_all_sites_is_computed_in_parts(model: Decoder, rows: tuple[Tensor, Tensor]) -> None:
    sizes = []
    with model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0]))):
        mean_gradient(model, *rows, len(rows[0]), InnerSection(batch_size=2), bf16=False)
    assert sizes == [2, 2, 1]


def test_parts_of_unequal_size_add_up_to_the_sites_gradient(model: Decoder, rows: tuple[Tensor, Tensor]) -> None:
    mean_gradient(model, *rows, 5, InnerSection(micro_batch=0), bf16=False)
    whole = _gradients(model)
    losses, parts = [], []
    for part in (slice(0, 2), slice(2, 5)):
        losses.append(mean_gradient(model, rows[0][part], rows[1][part], 5, InnerSection(micro_batch=0), bf16=False))
        parts.append(_gradients(model))
    torch.testing.assert_close([a + b for a, b in zip(*parts)], whole, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(sum(losses), mean_gradient(model, *rows, 5, InnerSection(micro_batch=0), bf16=False))


def test_gradients_do_not_pile_up_from_call_to_call(model: Decoder, rows: tuple[Tensor, Tensor]) -> None:
    mean_gradient(model, *rows, 5, InnerSection(micro_batch=2), bf16=False)
    once = _gradients(model)
    mean_gradient(model, *rows, 5, InnerSection(micro_batch=2), bf16=False)
    torch.testing.assert_close(_gradients(model), once, rtol=0, atol=0)


def test_bf16_is_near_and_leaves_fp32_gradients(model: Decoder, rows: tuple[Tensor, Tensor]) -> None:
    exact = mean_gradient(model, *rows, 5, InnerSection(micro_batch=0), bf16=False)
    near = mean_gradient(model, *rows, 5, InnerSection(micro_batch=0), bf16=True)
    assert 0.0 < abs(near - exact) < 0.05
    assert all(gradient.dtype == torch.float32 for gradient in _gradients(model))
