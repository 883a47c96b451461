"""One model merged from experts, compared with the ensemble of the same experts: bits per byte, and tokens per second.

    python -m bench.merging --cells FOLDER [--seeds 4-6] [--quick] [--json FILE]

The experts are those of bench/hdee.py's arm `auto`: eight built-in domains, S, 417 steps each from one seed model.
Cells that are not in FOLDER yet are trained. Bits per byte are means over the domains, on 200 test rows of each that
no expert was trained on. Training after the merge sees one window of every domain per step, from the experts' own
texts; the mean of the experts' weights is trained in the same way for comparison. `dense` is one model that continues
from the same seed model with all domains, for the FLOPs of all experts together. An expert is taken out of the merged
model as `pier-node merge --without` does it. Speeds are those of reading the same 400 rows.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import TypeVar

import click
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from bench.hdee import QUICK, ensemble, span
from bench.hdee_setting import Arms, Setting
from bench.hdee_train import CPU, MODEL, Shop, Texts, sheets
from pier_node.experts import merging
from pier_node.experts.comparison import evaluated
from pier_node.experts.scoring import log_probs, mean_bits
from pier_node.rounds.saved_model import exported_weights
from pier_node.trainer.data.corpus import Windows
from pier_node.trainer.model.decoder import Decoder

ACTIVE = 2
INFORMING = 64
"""Windows of each domain from which routers take their means."""
TUNED = (100, 300)
"""Steps of training after the merge."""
WIDTH = 160
"""Columns of the table, however narrow the terminal."""
ENSEMBLE = "ensemble (posterior)"
READ = {ENSEMBLE: "ensemble", "merged, not trained": "merged", "best single expert": "one expert"}
"""The row of the table that has the speed of each."""
Model = TypeVar("Model", bound=Decoder)


class Trial:
    """The experts of a seed, and what they can be made into."""

    def __init__(self, arms: Arms, texts: Texts, shop: Shop, seed: int) -> None:
        self._texts, self._seed, self._domains = texts, seed, arms.setting.domains
        self._places, self._dense = ensemble(shop, arms, seed, "auto"), shop.dense("M")
        self.experts = {domain: exported_weights(place / MODEL).model(CPU) for domain, place in self._places.items()}

    def figures(self) -> Iterator[tuple[str, float]]:
        """Mean bits per byte of each way."""
        yield "each domain's own expert", fmean(self._bits(self.experts[it], it) for it in self._domains)
        report = evaluated(sheets(self._places))
        yield ENSEMBLE, report.mean["decay"].bits_per_byte
        yield "best single expert", min(map(self.bits, self.experts.values()))
        yield "mean of the weights", self.bits(mean_of(self.experts))
        yield "merged, not trained", self.bits(self.merged())
        yield f"merged, routers trained {TUNED[0]} steps", self.bits(self._tuned(self.merged(), TUNED[0], routers=True))
        for steps in TUNED:
            merged = self._tuned(self.merged(), steps)
            yield f"merged, trained {steps} steps", self.bits(merged)
            yield f"mean of the weights, trained {steps} steps", self.bits(self._tuned(mean_of(self.experts), steps))
        yield from self._reduced(merged)
        yield "dense, for the FLOPs of all experts", self.bits(exported_weights(self._dense / MODEL).model(CPU))

    def _reduced(self, model: merging.MergedDecoder) -> Iterator[tuple[str, float]]:
        """A trained merged model without one expert, each in turn: on that expert's domain, and on the others."""
        own, others = list[float](), list[float]()
        for domain in self._domains:
            reduced = merging.without(model, domain)
            bits = {it: self._bits(reduced, it) for it in self._domains}
            own.append(bits.pop(domain))
            others += bits.values()
        yield f"merged, trained {TUNED[-1]} steps, without an expert: its domain", fmean(own)
        yield f"merged, trained {TUNED[-1]} steps, without an expert: the others", fmean(others)

    def merged(self) -> merging.MergedDecoder:
        """The experts as one model, with routers that know the domains."""
        model = merging.merge(self.experts, ACTIVE)
        model.inform({domain: self._windows(domain, "inform").batch(0, INFORMING)[0] for domain in self._domains})
        return model

    def _tuned(self, model: Model, steps: int, routers: bool = False) -> Model:
        windows = [self._windows(domain, "tune") for domain in self._domains]
        merging.tune(
            model, merging.batches(windows, steps), steps, merging.ROUTER_LR if routers else merging.LR, routers
        )
        return model

    def _windows(self, domain: str, what: str) -> Windows:
        return self._texts.windows(domain, self._seed, f"{what} {domain}")

    def bits(self, model: nn.Module) -> float:
        """Mean bits per byte over the domains."""
        return fmean(self._bits(model, domain) for domain in self._domains)

    def _bits(self, model: nn.Module, domain: str) -> float:
        return mean_bits(model, self._texts.scored[domain, "test"])

    def seconds(self) -> dict[str, float]:
        """CPU seconds a token: all experts, the merged model and one expert read the same rows, in turns."""
        rows = np.concatenate([self._texts.scored[domain, "test"] for domain in self._domains])[:400]
        merged, (one, *_) = self.merged(), self.experts.values()
        ways: dict[str, Callable[[], object]] = {
            "ensemble": lambda: [log_probs(model, rows) for model in self.experts.values()],
            "merged": lambda: log_probs(merged, rows),
            "one expert": lambda: log_probs(one, rows),
        }
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(5):
            for name, way in ways.items():
                began = time.process_time()
                way()
                taken[name].append(time.process_time() - began)
        return {name: sorted(times)[len(times) // 2] / rows.size for name, times in taken.items()}


def mean_of(experts: Mapping[str, Decoder]) -> Decoder:
    """A decoder whose weights are the mean of the experts'."""
    states = [expert.state_dict() for expert in experts.values()]
    model = Decoder(next(iter(experts.values())).config)
    model.load_state_dict({name: torch.stack([it[name] for it in states]).mean(dim=0) for name in states[0]})
    return model.requires_grad_(False).eval()


@click.command(help=__doc__)
@click.option("--cells", type=click.Path(file_okay=False, path_type=Path), required=True, help="Keeps what is trained.")
@click.option("--quick", is_flag=True, help="Tiny models and a few steps: no evidence.")
@click.option("--seeds", default="4-6", callback=span, show_default=True, help="First and last seed.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write all numbers here.")
def main(cells: Path, quick: bool, seeds: tuple[int, ...], json_file: Path | None) -> None:
    """Train what is missing, and compare."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    setting = replace(QUICK if quick else Setting(), excluded=())
    arms, texts = Arms(setting), Texts(setting, cells / "cache")
    found: dict[str, list[float]] = {}
    seconds: dict[str, float] = {}
    for seed in seeds:
        trial = Trial(arms, texts, Shop(arms, texts, seed, cells / f"seed-{seed}"), seed)
        for name, bits in trial.figures():
            found.setdefault(name, []).append(bits)
        seconds = seconds or trial.seconds()
    if json_file:
        figures = {"seeds": seeds, "bits_per_byte": found, "cpu_seconds_a_token": seconds}
        json_file.write_text(json.dumps(figures, indent=1) + "\n")
    Console(width=WIDTH).print(_table(found, seconds, seeds))


def _table(found: Mapping[str, list[float]], seconds: Mapping[str, float], seeds: tuple[int, ...]) -> Table:
    columns = *(f"seed {seed}" for seed in seeds), "mean", "std", "to ensemble", "tokens per CPU s"
    table = Table("bits per byte", *columns)
    base = fmean(found[ENSEMBLE])
    for name, bits in found.items():
        spread = f"{stdev(bits):.3f}" if len(bits) > 1 else ""
        speed = f"{1 / seconds[READ[name]]:,.0f}" if name in READ else ""
        figures = f"{fmean(bits):.3f}", spread, f"{fmean(bits) - base:+.3f}", speed
        table.add_row(name, *(f"{it:.3f}" for it in bits), *figures)
    return table


if __name__ == "__main__":
    main()
