"""What the recipes that HDEE compares (arXiv 2502.19385) cost, and that they cost the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from coordinator.experts.cases import curves, difficulty, everywhere, task

from pier_coordinator.experts.difficulty import EASY, HARD, MEDIUM
from pier_coordinator.experts.recipe import MODES, Mode, Recipe, recipe, scaled, whole
from pier_coordinator.experts.task import Size, Task
from pier_node.config.run import ModelSection
from pier_node.outer.layout import Layout
from pier_node.trainer.model.cost import flops_per_token

CLOSE = [{"dim": 768, "layers": 12, "heads": 12, "ffn_dim": width} for width in (2304, 3072, 3840)]
TINY = {
    5: {"dim": 272, "layers": 4, "heads": 8},
    7.5: {"dim": 272, "layers": 6, "heads": 8},
    10: {"dim": 320, "layers": 6, "heads": 10},
    12.5: {"dim": 330, "layers": 7, "heads": 11},
    15: {"dim": 340, "layers": 8, "heads": 10},
}
FAMILIES: dict[str, list[dict[str, int]]] = {
    "Small(Close)": CLOSE,
    **{
        name: [{**TINY[size], "ffn_dim": 4 * TINY[size]["dim"]} for size in sizes]
        for name, sizes in {"Tiny(Far)": (5, 10, 15), "Tiny(Close)": (7.5, 10, 12.5)}.items()
    },
}
NOTHING = np.arange(3)


def model(shape: dict[str, Any], vocabulary: int) -> ModelSection:
    return ModelSection(**shape, vocab_size=vocabulary, context=1024, tie_embeddings=False)


def of_family(name: str, vocabulary: int) -> Task:
    """A task with its sizes, head and attention counted."""
    models = [model(shape, vocabulary) for shape in FAMILIES[name]]
    sizes = tuple(Size("", Layout.of(each).length, flops_per_token(each), 0, 0) for each in models)
    return task(3, sizes=sizes)


def beyond(asked: Task, sizes: list[int], steps: list[int]) -> float:
    """Percent that a recipe costs more than MHo-IHo."""
    made = Recipe(np.array(sizes), np.array(steps), NOTHING)
    return 100 * (float(made.flops(asked).sum()) / asked.homogeneous - 1)


@pytest.mark.parametrize(
    ("family", "vocabulary", "percent"),
    [
        ("Small(Close)", 128_002, 0.0),
        ("Tiny(Far)", 128_002, -2.30),
        ("Tiny(Close)", 128_002, -3.06),
        ("Small(Close)", 260, 0.0),
        ("Tiny(Far)", 260, -0.49),
        ("Tiny(Close)", 260, -0.39),
    ],
)
def test_table_of_equal_compute(family: str, vocabulary: int, percent: float) -> None:
    asked = of_family(family, vocabulary)
    assert beyond(asked, [0, 1, 2], [400] * 3) == pytest.approx(percent, abs=0.005)
    assert beyond(asked, [1, 1, 1], [300, 400, 500]) == pytest.approx(0.0, abs=1e-9)


def usual(family: str) -> list[int]:
    """Elements of the matrices that are not embeddings."""
    layouts = [Layout.of(model(shape, 260)) for shape in FAMILIES[family]]
    return [
        sum(entry.size for entry in layout.entries if len(entry.shape) == 2 and entry.name.startswith("blocks."))
        for layout in layouts
    ]


@pytest.mark.parametrize(("family", "percent"), [("Small(Close)", 0.0), ("Tiny(Far)", -0.44), ("Tiny(Close)", -1.23)])
def test_table_of_what_is_usually_counted(family: str, percent: float) -> None:
    """6 N of the matrices, without embeddings."""
    counts = usual(family)
    assert 100 * (sum(counts) / (3 * counts[1]) - 1) == pytest.approx(percent, abs=0.005)


def test_small_large_and_more_steps_in_what_is_usually_counted() -> None:
    counts = usual("Small(Close)")
    steps = sum(count * number for count, number in zip(counts, (300, 400, 500)))
    assert 100 * (steps / (1200 * counts[1]) - 1) == pytest.approx(3.12, abs=0.01)


def test_small_large_and_more_steps_are_rescaled() -> None:
    asked = of_family("Small(Close)", 128_002)
    both = Recipe(np.array([0, 1, 2]), np.array([300, 400, 500]), NOTHING)
    assert beyond(asked, [0, 1, 2], [300, 400, 500]) == pytest.approx(1.54, abs=0.005)
    assert beyond(of_family("Small(Close)", 260), [0, 1, 2], [300, 400, 500]) == pytest.approx(2.67, abs=0.005)
    again = scaled(both, asked, asked.homogeneous)
    assert again.scale == pytest.approx(0.985, abs=5e-4)
    assert float(again.flops(asked).sum()) == pytest.approx(asked.homogeneous, rel=0.002)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("domains", [3, 4, 8, 9])
def test_all_modes_cost_the_same(mode: Mode, domains: int) -> None:
    asked = task(domains)
    made = recipe(mode, asked, difficulty(asked, curves(domains)), asked.homogeneous, everywhere(domains))
    assert float(made.flops(asked).sum()) == pytest.approx(asked.homogeneous, rel=0.002)


def test_the_modes_of_the_paper() -> None:
    asked, law = task(9), curves(9, seed=3)
    found = difficulty(asked, law)
    budget = asked.homogeneous
    sizes = recipe("MHe-IHo", asked, found, budget, everywhere(9))
    assert sorted(sizes.sizes.tolist()) == [0] * 3 + [1] * 3 + [2] * 3
    assert set(sizes.steps) == {400}
    assert found.size.value[sizes.sizes == 2].min() > found.size.value[sizes.sizes == 1].max()
    steps = recipe("MHo-IHe", asked, found, budget, everywhere(9))
    assert set(steps.sizes) == {1}
    assert sorted(steps.steps.tolist()) == [300] * 3 + [400] * 3 + [500] * 3
    assert found.step.value[steps.steps == 300].max() < found.step.value[steps.steps == 400].min()


def test_difficulty_by_hand_decides_beside_the_estimate_and_costs_the_same() -> None:
    asked, law = task(9), curves(9, seed=3)
    found = difficulty(asked, law)
    least, most = int(found.size.value.argmin()), int(found.size.value.argmax())
    domains = [*asked.domains]
    domains[least], domains[most] = replace(domains[least], difficulty=HARD), replace(domains[most], difficulty=EASY)
    by_hand = replace(asked, domains=tuple(domains))
    made = recipe("MHe-IHo", by_hand, found, by_hand.homogeneous, everywhere(9))
    assert (made.sizes[least], made.sizes[most]) == (2, 0)
    assert sorted(made.sizes.tolist()) == [0] * 3 + [1] * 3 + [2] * 3
    all_hard = replace(asked, domains=tuple(replace(domain, difficulty=HARD) for domain in asked.domains))
    scaled_down = recipe("MHo-IHe", all_hard, found, asked.homogeneous, everywhere(9))
    assert {*scaled_down.steps} == {400}
    assert scaled_down.scale == pytest.approx(0.8)


def test_the_chains_of_the_paper_by_hand() -> None:
    """Table 1 of arXiv 2502.19385: three easy, three medium and three hard domains, whatever is estimated."""
    asked = task(9, chain=True)
    kinds = (EASY, EASY, EASY, MEDIUM, MEDIUM, MEDIUM, HARD, HARD, HARD)
    domains = tuple(replace(domain, difficulty=kind) for domain, kind in zip(asked.domains, kinds))
    for seed in range(3):
        found = difficulty(asked, curves(9, seed))
        made = recipe("MHo-IHe", replace(asked, domains=domains), found, asked.homogeneous, everywhere(9))
        assert made.chains == [(0, 1, 2), (3, 4, 5), (6, 7, 8)]
        assert made.steps.tolist() == [400, 400, 300, 400, 400, 400, 400, 400, 500]


def test_another_budget_scales_all_steps() -> None:
    asked = task(3, budget=2.0)
    made = recipe("MHo-IHe", asked, difficulty(asked, curves(3)), 0.5 * asked.homogeneous, everywhere(3))
    assert sorted(made.steps.tolist()) == [150, 200, 250]
    assert made.scale == pytest.approx(0.5)


def test_auto_takes_sizes_that_fit_somewhere() -> None:
    asked = task(6)
    found = difficulty(asked, curves(6, seed=2))
    free = recipe("auto", asked, found, asked.homogeneous, everywhere(6))
    small = recipe("auto", asked, found, asked.homogeneous, everywhere(6) & [True, True, False])
    assert 2 in free.sizes
    assert 2 not in small.sizes
    assert float(small.flops(asked).sum()) == pytest.approx(asked.homogeneous, rel=0.002)


def test_a_chain_goes_through_a_class_and_only_its_last_domain_differs() -> None:
    asked = task(9, chain=True)
    found = difficulty(asked, curves(9, seed=1))
    made = recipe("MHo-IHe", asked, found, asked.homogeneous, everywhere(9))
    chains = made.chains
    assert [len(chain) for chain in chains] == [3, 3, 3]
    assert [[int(made.steps[domain]) for domain in chain] for chain in chains] == [
        [400, 400, 300],
        [400, 400, 400],
        [400, 400, 500],
    ]
    large = recipe("MHe-IHo", asked, found, asked.homogeneous, everywhere(9))
    assert all(len({int(large.sizes[domain]) for domain in chain}) == 1 for chain in large.chains)
    assert (EASY, MEDIUM, HARD) == (0, 1, 2), "chains are in this order"


def test_whole_steps_spend_the_budget_and_no_more() -> None:
    costs = np.array([1.0, 1.0, 2.0])
    assert whole(np.array([2.9, 2.6, 1.5]), costs, 8.5).tolist() == [3, 3, 1]
    assert whole(np.array([2.0, 3.0, 1.0]), costs, 7.0).tolist() == [2, 3, 1]
    assert whole(np.array([0.2, 3.0, 1.0]), costs, 7.0).tolist() == [1, 3, 1]
