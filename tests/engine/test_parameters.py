"""What programs share with the run: names and shapes of parameters, and their way in and out of flat vectors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import ShardingStrategy, fully_shard

from pier_node.base.errors import PierError
from pier_node.base.shared import SharedVector
from pier_node.config.run import load
from pier_node.engine.parameters import Vectors, describe, trained


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.frozen = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("steps", torch.zeros(7))
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)


def test_tied_parameters_count_once_and_frozen_ones_and_buffers_not_at_all() -> None:
    assert {name: tuple(it.shape) for name, it in trained(Tied()).items()} == {"scale": (), "embedding.weight": (5, 3)}


def test_wrappers_do_not_change_names() -> None:
    plain = nn.Sequential(nn.Linear(2, 2))
    compiled = torch.compile(plain)
    assert isinstance(compiled, nn.Module)
    assert trained(compiled).keys() == trained(plain).keys() == {"0.weight", "0.bias"}


def test_data_parallel_within_other_wrappers_does_not_change_names() -> None:
    """PyTorch recommends to compile what DistributedDataParallel has wrapped, and not the other way round."""
    plain = nn.Sequential(nn.Linear(2, 2))
    compiled = torch.compile(nn.DataParallel(plain))
    assert isinstance(compiled, nn.Module)
    assert trained(compiled).keys() == {"0.weight", "0.bias"}
    assert trained(nn.ModuleDict({"g": nn.DataParallel(plain)})).keys() == {"g.0.weight", "g.0.bias"}


class FullyShardedDataParallel(nn.Sequential):
    """What can be seen of PyTorch's own with several ranks."""

    sharding_strategy = ShardingStrategy.FULL_SHARD


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.waves = nn.Parameter(torch.zeros(3, dtype=torch.complex64))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Complex(), "waves of the model is complex"),
        (nn.Sequential(nn.LazyLinear(2)), "0.weight of the model has no shape yet"),
        (FullyShardedDataParallel(nn.Linear(2, 2)), "sharded by FullyShardedDataParallel"),
    ],
)
def test_what_would_be_shared_in_part_is_refused(model: nn.Module, words: str) -> None:
    with pytest.raises(PierError, match=words):
        trained(model)


def test_names_that_look_like_wrappers_are_names() -> None:
    model = nn.Sequential()
    model.add_module("module", nn.Linear(2, 2))
    model.add_module("my_module", nn.Linear(2, 2))
    assert trained(model).keys() == {"module.weight", "module.bias", "my_module.weight", "my_module.bias"}


def test_a_model_that_trains_nothing_is_refused() -> None:
    with pytest.raises(PierError, match="no parameter that requires a gradient"):
        trained(nn.Linear(2, 2).requires_grad_(False))


def test_the_description_of_a_model_is_that_of_a_run(tmp_path: Path) -> None:
    model = Tied()
    (file := tmp_path / "run.toml").write_text(f"[run]\nsites = 2\n{describe(model, 64)}")
    config = load(file)
    assert config.program
    assert (config.program.tensors, config.step_tokens) == (Vectors(model, rank=0).tensors, 64)
    assert config.outer.start == "none"


def test_a_step_without_tokens_is_refused() -> None:
    with pytest.raises(PierError, match="step_tokens = 0: Input should be greater than or equal to 1"):
        describe(Tied(), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_go_out_and_come_back(dtype: torch.dtype) -> None:
    model = Tied().to(dtype)
    vectors = Vectors(model, rank=0)
    assert vectors.length == 16
    out, back = SharedVector(16), SharedVector(16)
    vectors.store(out.path)
    assert out.array[0] == 2.0
    assert out.array[1:].tolist() == model.embedding.weight.detach().float().flatten().tolist()
    back.array[:] = range(16)
    vectors.take(back.array)
    assert model.scale.item() == 0.0
    assert model.head.weight.detach().flatten().tolist() == [*range(1, 16)]


def test_of_equal_replicas_the_first_rank_writes() -> None:
    shared = SharedVector(16)
    Vectors(Tied(), rank=1).store(shared.path)
    assert not shared.array.any()


def test_a_model_that_trains_other_parameters_than_at_first_is_refused() -> None:
    model = Tied()
    vectors = Vectors(model, rank=0)
    model.load_state_dict(Tied().state_dict())
    model.scale.requires_grad_(False)
    model.double()
    vectors.check()
    model.frozen.requires_grad_(True)
    with pytest.raises(PierError, match=r"trains frozen\.weight, which it did not"):
        vectors.check()
    model.load_state_dict(Tied().state_dict(), assign=True)
    with pytest.raises(PierError, match="another parameter scale than at"):
        vectors.check()


@pytest.fixture
def only_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("only_rank")
def test_a_sharded_model_that_has_other_parameters_while_it_computes_is_the_same() -> None:
    fully_shard(model := nn.Linear(2, 2))
    vectors = Vectors(model, rank=0)
    model(torch.zeros(1, 2))
    vectors.check()
    torch.autograd.backward(model(torch.ones(1, 2)).sum())
    assert all(parameter.grad is not None for parameter in vectors.parameters.values())


@pytest.mark.usefixtures("only_rank")
def test_a_sharded_model_that_trains_other_parameters_than_at_first_is_refused() -> None:
    fully_shard(model := nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)))
    vectors = Vectors(model, rank=0)
    model.load_state_dict(model.state_dict(), assign=True)
    with pytest.raises(PierError, match=r"another parameter 0\.weight than at"):
        vectors.check()
    vectors = Vectors(model, rank=0)
    model[1].requires_grad_(True)
    with pytest.raises(PierError, match=r"trains 1\.weight, which it did not"):
        vectors.check()
