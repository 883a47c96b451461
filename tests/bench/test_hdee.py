"""bench/hdee.py on three domains and with the smallest models: what it trains is what a site trains."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from bench import hdee, hdee_sizes
from bench.hdee_report import mixture_of
from bench.hdee_setting import BASE, DENSE, Arms, Setting, every_arm, modes
from bench.hdee_train import CELL, MissingError, Shop, Texts, cell_of, model_of, sheets, standing
from pier_node.experts import trainer
from pier_node.trainer.data.corpus import Windows
from pier_node.trainer.model.export import import_weights

pytestmark = pytest.mark.processes

DOMAINS = ("topics", "numbers", "concurrency")
TINY = Setting(
    domains=DOMAINS, excluded=("encodings",), dim=16, layers=1, ffn_dim=16, context=32, batch_size=6, steps=(6, 8, 10),
    seed_steps=4, seed_warmup=1, warmup_steps=1, test_rows=8, prior_rows=4,
)  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def arms() -> Arms:
    return Arms(TINY)


def test_all_arms_cost_the_same(arms: Arms) -> None:
    """Property 1, at the size that is measured."""
    real = Arms(Setting())
    assert [abs(real.flops(arm) / real.flops(BASE) - 1) < 0.01 for arm in (*modes(), *DENSE)] == [True] * 6
    assert {*arms.permuted} == {*DOMAINS}


def test_a_cell_holds_what_a_site_would_train(arms: Arms, tmp_path: Path) -> None:
    shop = Shop(arms, Texts(TINY, tmp_path / "cache"), 2, tmp_path / "cells")
    job = arms.of_size("topics", "L", 2)
    place = shop.expert(job)
    site = trainer.Shop(TINY.run(2), tmp_path / "site", workers=1)
    parent = trainer.Parent(shop.parent.name, shop.parent.config, shop.parent.flat.numpy())
    card = asyncio.run(asyncio.wait_for(trainer.train_expert(job, parent, site, lambda _step: None), 120))
    _, flat = import_weights(site.place(card.name))
    cell, own = cell_of(place), sheets({"topics": place})
    assert card.name == place.name
    assert {sheet.subject.weights for sheet in own} == {hashlib.sha256(flat.numpy().tobytes()).hexdigest()}
    assert (cell.steps, cell.tokens, cell.flops, cell.accepted) == (card.steps, card.tokens, card.flops, card.accepted)
    assert (cell.loss, cell.parent_loss) == pytest.approx((card.loss, card.parent_loss), rel=1e-6)
    assert len(own) == 2 * (len(DOMAINS) + 1), "and on the domain that it was not trained on"


def test_what_is_there_is_not_trained_again(arms: Arms, tmp_path: Path) -> None:
    texts = Texts(TINY, tmp_path / "cache")
    shop = Shop(arms, texts, 1, tmp_path / "cells")
    shop.trains = False
    with pytest.raises(MissingError):
        shop.seed_model()
    shop.trains = True
    place = shop.seed_model()
    again = Shop(arms, texts, 1, tmp_path / "cells")
    again.trains = False
    assert again.seed_model() == place
    with pytest.raises(MissingError):
        again.dense("M")


def test_from_nothing_to_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdee, "QUICK", TINY)
    files = "--json", str(tmp_path / "found.json"), "--plot", str(tmp_path / "found.png")
    words = ["--cells", str(tmp_path / "cells"), "--quick", "--seeds", "1-2", *files]
    first = CliRunner(env={"COLUMNS": "200"}).invoke(hdee.main, words)
    assert first.exit_code == 0, first.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert [*found["arms"]] == [*every_arm()]
    for arm in found["arms"].values():
        assert arm["flops"] == pytest.approx(arm["planned_flops"], rel=1e-9)
        assert {*arm["bits"]} == {*DOMAINS}
        assert {*arm["excluded"]["bits"]} == {"encodings"}
    base = found["arms"][BASE]
    assert (base["mean_gap"]["mean"], base["mean_gap"]["verdict"]) == (0.0, "tie")
    assert len(found["permutations"]["ways"]) == 6
    assert (tmp_path / "found.png").stat().st_size > 10_000
    again = CliRunner(env={"COLUMNS": "200"}).invoke(hdee.main, [*words, "--as-it-is"])
    assert again.exit_code == 0, again.output
    assert json.loads((tmp_path / "found.json").read_text()) == found
    chosen = CliRunner(env={"COLUMNS": "200"}).invoke(hdee.main, [*words, "--as-it-is", "--arm", "auto"])
    assert chosen.exit_code == 0, chosen.output
    assert [*json.loads((tmp_path / "found.json").read_text())["arms"]] == [BASE, "auto"]


def test_private_domains_are_seen_by_their_experts_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdee, "QUICK", TINY)
    seen: list[tuple[str, str]] = []
    windows = Texts.windows

    def noted(texts: Texts, domain: str, seed: int, node: str) -> Windows:
        seen.append((node.split()[0], domain))
        return windows(texts, domain, seed, node)

    monkeypatch.setattr(Texts, "windows", noted)
    words = ["--cells", str(tmp_path / "cells"), "--quick", "--seeds", "1", "--private", "--arm", "dense M"]
    done = CliRunner(env={"COLUMNS": "200"}).invoke(hdee.main, [*words, "--json", str(tmp_path / "found.json")])
    assert done.exit_code == 0, done.output
    assert [domain for what, domain in seen if what in ("seed", "dense")] == ["topics", "topics"]
    assert len([what for what, _ in seen if what not in ("seed", "dense")]) == len(DOMAINS), "an expert each"
    found = json.loads((tmp_path / "found.json").read_text())["arms"]["dense M"]
    assert ([*found["shared"]["bits"]], [*found["private"]["bits"]]) == (["topics"], ["numbers", "concurrency"])
    assert "Private." in done.output


def test_classes_by_hand_decide_who_gets_more_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdee, "QUICK", TINY)
    monkeypatch.setattr(hdee, "BY_HAND", {"topics": "easy", "numbers": "hard", "concurrency": "medium"})
    words = ["--cells", str(tmp_path / "cells"), "--quick", "--seeds", "1", "--hand"]
    done = CliRunner(env={"COLUMNS": "200"}).invoke(hdee.main, [*words, "--json", str(tmp_path / "found.json")])
    assert done.exit_code == 0, done.output
    told = json.loads((tmp_path / "found.json").read_text())
    assert ({*told["best of two"]["lower"]}, {*told["best of two, excluded"]["lower"]}) == ({*DOMAINS}, {"encodings"})
    found = told["arms"]
    assert found["MHo-IHe"]["recipe"] == {"topics": ["M", 6], "numbers": ["M", 10], "concurrency": ["M", 8]}
    assert found["MHe-IHo"]["recipe"] == {"topics": ["S", 8], "numbers": ["L", 8], "concurrency": ["M", 8]}
    assert [*found] == [BASE, "MHo-IHe", "MHe-IHo"], "auto refuses classes"
    refused = CliRunner().invoke(hdee.main, [*words, "--installed"])
    assert "those of the built-in domains" in refused.output


CHAINED = replace(TINY, by_hand={"topics": "easy", "numbers": "easy", "concurrency": "hard"}, chain=True)


def test_a_chain_trains_on_its_domains_in_turn_and_its_last_expert_predicts(tmp_path: Path) -> None:
    """The second expert is what a site makes of the first one."""
    chained = Arms(CHAINED)
    shop = Shop(chained, Texts(CHAINED, tmp_path / "cache"), 2, tmp_path / "cells")
    jobs = chained.jobs(BASE, 2)
    places = shop.experts(jobs)
    site = trainer.Shop(CHAINED.run(2), tmp_path / "site", workers=1)
    parent = trainer.Parent(shop.parent.name, shop.parent.config, shop.parent.flat.numpy())
    for domain in ("topics", "numbers"):
        card = asyncio.run(asyncio.wait_for(trainer.train_expert(jobs[domain], parent, site, lambda _step: None), 120))
        model, flat = import_weights(site.place(card.name))
        parent = trainer.Parent(card.name, model, flat.numpy())
        assert torch.equal(flat, model_of(places[domain]).flat)
    ensemble = {"numbers": places["numbers"], "concurrency": places["concurrency"]}
    found, last = mixture_of(places), mixture_of(ensemble)
    assert {*found} == {*DOMAINS, "encodings"}
    assert all((found[domain] == last[domain]).all() for domain in found)


def test_a_refused_expert_of_a_chain_is_replaced_by_the_one_before_it(tmp_path: Path) -> None:
    chained = Arms(CHAINED)
    shop = Shop(chained, Texts(CHAINED, tmp_path / "cache"), 2, tmp_path / "cells")
    parent, places = shop.seed_model(), shop.experts(chained.jobs(BASE, 2))
    refused = cell_of(places["numbers"]).model_copy(update={"accepted": False})
    (places["numbers"] / CELL).write_text(refused.model_dump_json())
    before = cell_of(places["topics"]).model_copy(update={"accepted": True})
    (places["topics"] / CELL).write_text(before.model_dump_json())
    assert standing(places["numbers"]) == places["topics"]
    (places["topics"] / CELL).write_text(before.model_copy(update={"accepted": False}).model_dump_json())
    assert standing(places["numbers"]) == parent


def test_chains_from_nothing_to_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdee, "QUICK", TINY)
    words = ["--cells", str(tmp_path / "cells"), "--quick", "--seeds", "1", "--chain"]
    done = CliRunner(env={"COLUMNS": "200"}).invoke(hdee.main, [*words, "--json", str(tmp_path / "found.json")])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "found.json").read_text())["arms"]
    assert {*found[BASE]["bits"]} == {*DOMAINS}
    for arm in found.values():
        assert arm["flops"] == pytest.approx(arm["planned_flops"], rel=1e-9), "of all its experts, not of the last ones"


def test_sizes_at_equal_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdee_sizes, "SMALL", replace(TINY, excluded=()))
    done = CliRunner().invoke(hdee_sizes.main, ["--cells", str(tmp_path), "--seeds", "1"])
    assert done.exit_code == 0, done.output
    steps = [int(line.split()[1]) for line in done.output.splitlines()]
    assert [line[0] for line in done.output.splitlines()] == ["S", "M", "L"]
    assert steps[0] > steps[1] == TINY.steps[1] > steps[2]
