import pytest
import torch
from torch import Tensor

from pier_node.config.run import ModelSection
from pier_node.outer.layout import Layout
from pier_node.trainer.model.huggingface import Rule, rules


def test_the_rules_name_every_parameter_once(config: ModelSection) -> None:
    ours = [name for rule in rules(config) for name in rule.ours]
    assert sorted(ours) == sorted(entry.name for entry in Layout.of(config).entries)
    theirs = [rule.theirs for rule in rules(config)]
    assert len(set(theirs)) == len(theirs)


def test_splitting_what_was_joined_gives_the_same_tensors(config: ModelSection, weights: Tensor) -> None:
    layout = Layout.of(config)
    shapes = {entry.name: entry.shape for entry in layout.entries}
    back = torch.zeros_like(weights)
    for rule in rules(config):
        layout.store(rule.split(rule.join(layout.views(weights)), shapes), back)
    assert torch.equal(back, weights)


def test_fused_and_transposed() -> None:
    """c_attn of a Conv1D: rows are inputs, columns are queries, then keys, then values."""
    rule = Rule("c_attn", ("q", "k", "v"), transposed=True)
    tensors = {name: torch.tensor([[1.0, 2.0], [3.0, 4.0]]) + ten for name, ten in (("q", 0), ("k", 10), ("v", 20))}
    fused = rule.join(tensors)
    assert fused.tolist() == [[1, 3, 11, 13, 21, 23], [2, 4, 12, 14, 22, 24]]
    assert fused.is_contiguous()


def test_too_few_rows_are_refused() -> None:
    rule = Rule("c_attn.bias", ("q", "k"))
    with pytest.raises(RuntimeError, match="split"):
        rule.split(torch.zeros(3), {"q": (2,), "k": (2,)})
