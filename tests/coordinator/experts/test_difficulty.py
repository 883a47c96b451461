"""What sizes and steps a difficulty deserves, checked three ways: docs/experts.md, "How it is planned"."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from coordinator.experts.cases import curves, everywhere, task
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from pier_coordinator.experts.difficulty import (
    EASY,
    ESTIMATED,
    HARD,
    MEDIUM,
    Classes,
    Curves,
    Probes,
    Sample,
    bits,
    classes,
    estimated,
    fitted,
    probed,
    refitted,
    size_gain,
    steadiness,
    step_gain,
)
from pier_coordinator.experts.recipe import recipe
from pier_node.experts.mixture import Array

TASK = task(9)
COUNTS = np.array([2e7, 6e7, 1.4e8])


def probes(law: Curves, noise: float, rows: int = 200, seed: int = 0) -> Probes:
    """Short runs of S, M and L; rows are as unlike as `noise` says, and the same ones are scored at all points."""
    parameters, tokens = np.tile(TASK.choice.parameters, 3), np.repeat(COUNTS, 3)
    means = np.stack([law.loss(size, count) for size, count in zip(parameters, tokens)], axis=-1)
    random = np.random.default_rng(seed)
    of_row = noise * random.standard_normal((len(means), 1, rows))
    of_both = 0.02 * noise * random.standard_normal((*means.shape, rows))
    return Probes(parameters, tokens, means[..., None] + of_row + of_both)


def none(domains: int) -> Classes:
    """No class is set by hand."""
    return np.full(domains, ESTIMATED)


def with_noise_domain() -> Curves:
    """The last domain is noise: the highest loss by far, and nothing helps."""
    law = curves(9, seed=4)
    floor, size, data = law.floor.copy(), law.size.copy(), law.data.copy()
    floor[-1], size[-1], data[-1] = 7.0, 5.0, 5.0
    return Curves(floor, size, data, law.alpha, law.beta, law.warm)


@pytest.mark.parametrize("seed", range(3))
def test_a_domains_are_ranked_as_they_are(seed: int) -> None:
    law = curves(9, seed)
    found = estimated(probes(law, 0.05), TASK.choice, TASK.weights)
    for gain, true in ((found.size, size_gain), (found.step, step_gain)):
        assert spearmanr(gain.value, true(law, TASK.choice, TASK.weights)).statistic >= 0.9


def test_a_noise_is_not_given_the_large_model_although_its_loss_is_highest() -> None:
    found = estimated(probes(with_noise_domain(), 0.05), TASK.choice, TASK.weights)
    assert found.loss.argmax() == 8
    for mode in ("MHe-IHo", "auto"):
        assert recipe(mode, TASK, found, TASK.homogeneous, everywhere(9)).sizes[8] != 2
    assert recipe("MHo-IHe", TASK, found, TASK.homogeneous, everywhere(9)).steps[8] == 300


def test_b_classes_are_steady() -> None:
    """Where domains differ; the third of nine that is nearest to the next one decides."""
    size = np.array([50, 60, 70, 200, 210, 220, 400, 420, 440], dtype=float)
    law = Curves(np.linspace(1, 2, 9), size, size[::-1].copy(), 0.34, 0.28, 1e8)
    found = estimated(probes(law, 0.05), TASK.choice, TASK.weights)
    assert steadiness(found.size, found.loss, TASK.given).min() >= 0.95
    assert classes(found.size.value, found.loss, TASK.given).tolist() == [EASY] * 3 + [MEDIUM] * 3 + [HARD] * 3


@pytest.mark.parametrize("noise", [0.05, 0.5])
def test_auto_takes_all_domains_alike_whatever_stand_ins_say_of_them(noise: float) -> None:
    found = estimated(probes(curves(9, seed=4), noise), TASK.choice, TASK.weights).of_stand_ins(TASK.choice)
    made = recipe("auto", TASK, found, TASK.homogeneous, everywhere(9))
    assert len({*made.sizes}) == 1
    assert max(made.steps) - min(made.steps) <= 1
    classed = recipe("MHe-IHo", TASK, found, TASK.homogeneous, everywhere(9))
    assert sorted(classed.sizes) == [0] * 3 + [1] * 3 + [2] * 3, "the paper's modes still rank them"


@pytest.mark.parametrize(("steps", "size"), [(100, "S"), (400, "S"), (4000, "S"), (40_000, "L")])
def test_size_pays_with_many_tokens_per_parameter(steps: int, size: str) -> None:
    """With 400 steps the paper's experts see 2 tokens per parameter that computes, with 4,000 they see 21."""
    sizes = tuple(replace(each, flops=flops) for each, flops in zip(TASK.sizes, (0.667e9, 0.794e9, 0.921e9)))
    asked = task(3, steps=(steps // 2, steps, 2 * steps), sizes=sizes)
    found = estimated(probes(curves(3), 0.05), asked.choice, asked.weights).of_stand_ins(asked.choice)
    made = recipe("auto", asked, found, asked.homogeneous, everywhere(3))
    assert {asked.sizes[index].name for index in made.sizes} == {size}


def test_the_same_probes_give_the_same_answer() -> None:
    given_ = probes(curves(9), 0.05)
    one, other = (estimated(given_, TASK.choice, TASK.weights) for _ in range(2))
    assert one.size.draws.tobytes() == other.size.draws.tobytes()


@given(st.lists(st.floats(0, 1), min_size=3, max_size=30), st.randoms(use_true_random=False))
def test_as_many_are_large_as_small_and_these_gain_no_less(gains: list[float], random: object) -> None:
    found, gain = classes(np.array(gains), np.arange(len(gains), dtype=float), none(len(gains))), np.array(gains)
    assert (found == HARD).sum() == (found == EASY).sum() == len(gains) // 3
    assert gain[found == HARD].min() >= gain[found == MEDIUM].max(initial=0)
    assert gain[found == EASY].max() <= gain[found == MEDIUM].min(initial=1)


@given(st.lists(st.tuples(st.floats(0, 1), st.sampled_from([ESTIMATED, EASY, MEDIUM, HARD])), min_size=3, max_size=30))
def test_classes_by_hand_stay_and_the_others_fill_the_thirds(domains: list[tuple[float, int]]) -> None:
    gain, by_hand = (np.array(column) for column in zip(*domains))
    found, free = classes(gain, np.zeros(len(gain)), by_hand), by_hand == ESTIMATED
    assert (found[~free] == by_hand[~free]).all()
    assert {*found} <= {EASY, MEDIUM, HARD}
    third = len(gain) // 3
    for kind in (HARD, EASY):
        wanted = max(0, third - int((by_hand == kind).sum()))
        assert (found[free] == kind).sum() <= wanted
        if free.sum() >= 2 * third:
            assert (found[free] == kind).sum() == wanted
    assert gain[free & (found == HARD)].min(initial=1) >= gain[free & (found != HARD)].max(initial=0)


def test_the_loss_breaks_ties_only() -> None:
    assert classes(np.array([1.0, 1.0, 1.0]), np.array([2.0, 3.0, 1.0]), none(3)).tolist() == [MEDIUM, HARD, EASY]
    assert classes(np.array([3.0, 1.0, 2.0]), np.array([0.0, 9.0, 5.0]), none(3)).tolist() == [HARD, EASY, MEDIUM]


def text(order: int, seed: int) -> bytes:
    """Of a Markov chain over 6 letters that looks so many letters back."""
    random = np.random.default_rng(seed)
    table = random.dirichlet(np.full(6, 0.15), 6**order)
    letters, state = [], 0
    for draw in random.random(24_000):
        letter = int(np.searchsorted(table[state].cumsum(), draw))
        letters.append(min(letter, 5))
        state = (state * 6 + letters[-1]) % 6**order
    return bytes(97 + letter for letter in letters)


def test_c_the_predicted_permutation_of_sizes_is_as_good_as_the_best() -> None:
    """Three domains, an order of n-grams for each size: predicted from short probes, compared after the whole text."""
    texts = [text(order, seed) for order, seed in ((1, 1), (2, 2), (3, 3))]
    small = np.stack([bits(each[:6000], each[20_000:22_000], (1, 2, 3)).mean(axis=1) for each in texts])
    gains = small[:, 0] - small[:, 2]
    predicted = classes(gains, small[:, 0], none(3))
    full = np.stack([bits(each[:20_000], each[22_000:], (1, 2, 3)).mean(axis=1) for each in texts])
    every = {sizes: float(np.mean(full[range(3), sizes])) for sizes in permutations(range(3))}
    chosen = every[tuple(predicted.tolist())]
    assert chosen <= min(every.values()) * 1.01
    assert chosen < np.mean([*every.values()])


TEXT = b"the cat sat on the mat; the rat sat on the cat."


def chance(train: bytes, before: bytes, byte: int, order: int) -> float:
    """The definition, in words of counts."""
    if order < 0:
        return 1 / 256
    context = before[len(before) - order :]
    found = Counter(
        padded[index + order]
        for padded in [bytes(order) + train]
        for index in range(len(train))
        if padded[index : index + order] == context
    )
    shorter = chance(train, before, byte, order - 1)
    total, kinds = sum(found.values()), len(found)
    return (found[byte] + kinds * shorter) / (total + kinds) if total else shorter


def test_it_is_interpolated_as_defined() -> None:
    asked = b"the hat sat"
    found = bits(TEXT, asked, (0, 2))
    for row, order in enumerate((0, 2)):
        expected = [-np.log2(chance(TEXT, bytes(2) + asked[:index], byte, order)) for index, byte in enumerate(asked)]
        assert found[row] == pytest.approx(expected)


def test_chances_are_a_distribution() -> None:
    every = np.array([bits(TEXT, TEXT[:9] + bytes([byte]), (3,))[0, -1] for byte in range(256)])
    assert (2.0**-every).sum() == pytest.approx(1)


def test_more_text_and_more_context_help_where_there_is_order() -> None:
    random = np.random.default_rng(0)
    words = [bytes(random.integers(97, 123, 6).astype(np.uint8)) for _ in range(300)]
    text = b" ".join(words[index] for index in random.integers(0, 300, 6000))
    noise = random.integers(0, 256, 40_000).astype(np.uint8).tobytes()
    probes = probed([Sample(each[:-8192], each[-8192:]) for each in (text, noise)], np.array([1.0, 2.0, 3.0]))
    assert probes.losses.shape == (2, 9, 16)
    assert probes.tokens.tolist() == sorted(probes.tokens.tolist())
    means = probes.losses.mean(axis=-1)
    assert means[0, 0] > means[0, 2], "size"
    assert means[0, 0] > means[0, 6], "tokens"
    assert means[1].min() >= 7.9, "nothing helps with noise"


def test_a_sample_that_is_too_short_is_named() -> None:
    with pytest.raises(ValueError, match="1"):
        probed([Sample(TEXT * 50, TEXT * 50), Sample(TEXT, TEXT)], np.ones(3))


SIZES, TOKENS_SEEN = np.array([92e6, 113e6, 134e6]), np.array([1e8, 3e8, 9e8])
PARAMETERS, TOKENS = np.tile(SIZES, 3), np.repeat(TOKENS_SEEN, 3)


def losses(law: Curves) -> Array:
    """At all sizes and counts, [domains, points]."""
    return np.stack([law.loss(size, count) for size, count in zip(PARAMETERS, TOKENS)], axis=-1)


def test_golden() -> None:
    law = Curves(np.array([1.0]), np.array([100.0]), np.array([50.0]), 0.5, 0.5, 21.0)
    assert law.loss(10_000.0, 100.0).tolist() == pytest.approx([1.0 + 1.0 + 50 / 11])


def test_a_law_is_found_again() -> None:
    law = replace(curves(5), warm=0.3 * 9e8)
    found = fitted(PARAMETERS, TOKENS, losses(law))
    assert (found.alpha, found.beta, found.warm) == (0.34, 0.28, 0.3 * 9e8)
    assert found.data == pytest.approx(law.data, rel=1e-3)
    assert found.size == pytest.approx(law.size, rel=1e-2)


def test_what_does_not_help_has_no_negative_coefficient() -> None:
    """A loss that grows with the model, and with the tokens."""
    worse = 1 + 1e-9 * PARAMETERS + 1e-10 * TOKENS
    found = refitted((0.34, 0.28, 0.0), PARAMETERS, TOKENS, worse[None])
    assert min(found.floor.min(), found.size.min(), found.data.min()) >= 0
    assert found.size.tolist() == [0.0]


def test_a_bootstrap_is_refitted_at_once_and_as_one_by_one() -> None:
    law = (0.34, 0.28, 1e8)
    drawn = losses(curves(4)) + 0.01 * np.random.default_rng(0).standard_normal((7, 4, 9))
    together = refitted(law, PARAMETERS, TOKENS, drawn)
    for index, draw in enumerate(drawn):
        alone = refitted(law, PARAMETERS, TOKENS, draw)
        assert together.data[index] == pytest.approx(alone.data)
        assert together.floor[index] == pytest.approx(alone.floor)


def test_the_law_that_domains_share_is_balanced_at_sixty_tokens_per_parameter() -> None:
    law, up = Curves.alike(6, 1.1e8), 1 + 1e-6
    by_size = law.loss(1.1e8, 6.6e9) - law.loss(1.1e8 * up, 6.6e9)
    by_data = law.loss(1.1e8, 6.6e9) - law.loss(1.1e8, 6.6e9 * up)
    assert by_size == pytest.approx(by_data, rel=1e-3)
    assert len({*law.loss(1e8, 1e9)}) == 1
