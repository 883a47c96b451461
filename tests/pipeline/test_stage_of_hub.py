"""Models of transformers in stages: together they compute what the whole model computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer.hub_cases import KINDS, made

from pier_node.base.errors import PierError
from pier_node.config.run import RunConfig
from pier_node.outer.layout import Layout
from pier_node.pipeline.stage import Stage, stage_blocks, stage_layout
from pier_node.trainer.model.evaluate import omissions
from pier_node.trainer.model.hub import filled_model, import_weights, read_config
from pier_node.trainer.model.hub_part import divisible

CPU = torch.device("cpu")
LAYERS, STAGES = 5, 3


def run_of(folder: Path) -> RunConfig:
    model = read_config(folder).model_dump(exclude_none=True)
    tables: dict[str, Any] = {"run": {"sites": STAGES}, "pipeline": {"stages": STAGES}, "model": model}
    return RunConfig.model_validate(tables)


def built(run: RunConfig, flat: torch.Tensor) -> list[Stage]:
    whole, stages = Layout.of(run.model).views(flat), [Stage(run, number, CPU) for number in range(STAGES)]
    for stage in stages:
        stage.load(torch.cat([whole[it.name].flatten() for it in stage.layout.entries]))
        stage.begin([0])
    return stages


def through(stages: list[Stage], order: list[int], tokens: torch.Tensor, targets: torch.Tensor) -> float:
    """Loss of one microbatch on that path, after which the stages have its gradient."""
    x = stages[0].embed(0, tokens)
    for number in order:
        x = stages[number].forward(0, x)
    loss, gradient = stages[0].loss(0, x, targets)
    for number in reversed(order):
        found = stages[number].backward(0, gradient)
        assert found is not None
        gradient = found
    assert stages[0].backward(0, gradient) is None
    return loss


@pytest.mark.parametrize("kind", KINDS)
def test_stages_lose_what_the_whole_model_loses_and_have_its_gradient(kind: str, tmp_path: Path) -> None:
    kept = {"layer_types": None} if "sliding_window" in KINDS[kind] and kind.startswith("gemma") else {}
    made(kind, tmp_path, num_hidden_layers=LAYERS, **kept)
    run, (_, flat) = run_of(tmp_path), import_weights(tmp_path)
    tokens = torch.randint(run.model.vocab_size, (2, 17), generator=torch.Generator().manual_seed(1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    whole = filled_model(run.model, flat, CPU)
    expected = whole(inputs, targets) / targets.numel()
    expected.backward()
    wanted = {name: parameter.grad for name, parameter in whole.named_parameters()}

    stages = built(run, flat)
    assert through(stages, [1, 2], inputs, targets) == pytest.approx(expected.item(), rel=1e-6)
    seen = set()
    for stage in stages:
        gradient = torch.empty(stage.layout.length)
        stage.mean_gradient(gradient)
        for name, part in stage.layout.views(gradient).items():
            torch.testing.assert_close(part, wanted[name], rtol=1e-4, atol=1e-6, msg=name)
            seen.add(name)
    assert seen == wanted.keys()


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_a_stage_left_out_is_as_if_the_model_had_no_such_blocks(kind: str, tmp_path: Path) -> None:
    whole = made(kind, tmp_path, num_hidden_layers=LAYERS, use_cache=False)
    run, (_, flat) = run_of(tmp_path), import_weights(tmp_path)
    tokens = torch.randint(run.model.vocab_size, (1, 9), generator=torch.Generator().manual_seed(2))
    loss = through(built(run, flat), [2], tokens[:, :-1], tokens[:, 1:])
    left_out = {it.block for it in stage_layout(run.model, STAGES, 1).entries}
    for index in left_out:
        assert index is not None
        whole.model.layers[index].forward = lambda hidden_states, *_args, **_options: hidden_states
    expected = whole(input_ids=tokens, labels=tokens).loss.item()
    assert loss == pytest.approx(expected, rel=1e-5)

    model, windows = divisible(filled_model(run.model, flat, CPU)), [(tokens[:, :-1].numpy(), tokens[:, 1:].numpy())]
    (measured,) = omissions(model, windows, stage_blocks(LAYERS, STAGES), [(1,)], bf16=False)
    assert measured.loss == pytest.approx(expected, rel=1e-5), "as `pier-node evaluate --skip` has it"


def test_what_a_block_is_told_of_the_text_besides_activations_is_noticed(tmp_path: Path) -> None:
    made("qwen3", tmp_path, num_hidden_layers=LAYERS)
    run = run_of(tmp_path)
    model: Any = pytest.importorskip("transformers.models.qwen3.modeling_qwen3").Qwen3Model
    forward = model.forward

    def with_more(self: Any, *args: Any, inputs_embeds: Any = None, **options: Any) -> Any:
        return forward(self, *args, inputs_embeds=inputs_embeds, told=inputs_embeds, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "forward", with_more)
        with pytest.raises(PierError, match="cannot be divided into stages: its blocks are given more of the text"):
            Stage(run, 1, CPU)
