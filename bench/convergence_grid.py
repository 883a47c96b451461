"""What bench.convergence measures: settings, methods, the sweep that tunes each method, and the tables made of them.

A cell is one run: (setting, method with its hyperparameters, seed). Its name says all of it and is that of its file:
short_diloco-start_lr0.002_mu0.8_eta0.8_seed1.

A method is tuned axis by axis, each time from the best values so far, on seeds that are not reported. The values with
the least mean loss are taken, over the tuning seeds that all candidates have which have been run. So the choice, and
with it the cells that a table needs, follows from the cells that exist.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from pier_node.config.run import RunConfig

TUNING = (11, 12)
"""Seeds on which hyperparameters are chosen."""
REPORTED = (1, 2, 3)

Values = dict[str, float]
"""Hyperparameters by their short name, in the order of KEYS."""
KEYS = {
    "lr": ("inner", "lr"),
    "mu": ("outer", "momentum"),
    "eta": ("outer", "lr"),
    "start": ("outer", "start_fraction"),
    "alpha": ("outer", "noloco", "alpha"),
    "beta": ("outer", "noloco", "beta"),
    "gamma": ("outer", "noloco", "gamma"),
    "decay": ("outer", "error_decay"),
    "density": ("outer", "density"),
    "end": ("inner", "min_lr"),
}
"""Where each stands in run.toml; `end` as a part of the learning rate: the setting's if it is not given."""


@dataclass(frozen=True)
class Setting:
    """What all methods of a table have in common; 253k parameters.

    Attributes:
        domains: every site has a domain of its own: source code by package family, docstrings, help texts.
        tuned_at: the setting whose tuning is taken over; "": its own.
        slower: learning rates are tried at this times those of RATES: what a long run wants is less.
        end: the learning rate falls to this part of its peak.
    """

    sites: int = 4
    dim: int = 80
    layers: int = 3
    ffn_dim: int = 216
    context: int = 64
    batch_size: int = 4
    total_steps: int = 2000
    inner_steps: int = 20
    warmup_steps: int = 100
    eval_steps: int = 100
    eval_batches: int = 8
    domains: bool = False
    tuned_at: str = ""
    slower: float = 1.0
    end: float = 0.1

    @property
    def model(self) -> dict[str, str | int]:
        """[model] of its runs."""
        shape = {"dim": self.dim, "layers": self.layers, "heads": 4, "ffn_dim": self.ffn_dim, "context": self.context}
        return {"preset": "llama-1m", **shape}

    def config(self, method: Method, values: Values, seed: int) -> RunConfig:
        """The run of one cell."""
        inner = {key: getattr(self, key) for key in ("batch_size", "total_steps", "warmup_steps", "eval_batches")}
        tables: dict[str, Any] = {
            "run": {"name": "convergence", "seed": seed, "sites": self.sites},
            "model": self.model,
            "data": {"validation": 0.05} if self.domains else {},
            "inner": {**inner, "precision": "fp32", **method.inner},
            "outer": {"inner_steps": self.inner_steps, **method.outer},
        }
        for name, value in {**values, "end": values["lr"] * values.get("end", self.end)}.items():
            *path, key = KEYS[name]
            table = tables
            for part in path:
                table = table.setdefault(part, {})
            table[key] = value
        return RunConfig.model_validate(tables)


LONG = Setting(dim=64, layers=2, ffn_dim=172, total_steps=40_000, eval_steps=1000, slower=0.5)
SETTINGS = {
    "short": Setting(),
    "domains": Setting(domains=True, tuned_at="short"),
    "wide": Setting(sites=16),
    "long": LONG,
    "long-end": replace(LONG, end=0.01),
    "quick": Setting(
        dim=32, layers=2, ffn_dim=64, context=32, batch_size=2, total_steps=200, inner_steps=10, warmup_steps=10,
        eval_steps=20, eval_batches=2,
    ),
}  # fmt: skip
"""short: 100 rounds. domains: the same, on unequal data. wide: 16 sites. long: 2,000 rounds, 115k parameters;
long-end: the same, with a learning rate that falls to a hundredth."""

Axis = tuple[Values, ...]
RATES: Axis = tuple({"lr": rate} for rate in (4e-3, 2e-3, 8e-3))
"""If the best of them is the least or the greatest, half or twice as much is tried, too."""
OUTER: Axis = tuple({"mu": mu, "eta": eta} for mu, eta in ((0.8, 0.8), (0.9, 0.7), (0.6, 0.9), (0.7, 0.7), (0.0, 1.0)))
SPARSE: Axis = tuple(
    {"lr": lr, "mu": mu, "eta": eta}
    for lr, mu, eta in ((4e-3, 0.0, 1.0), (4e-3, 0.0, 2.0), (4e-3, 0.0, 4.0), (2e-3, 0.0, 2.0), (2e-3, 0.0, 4.0))
)
"""With them the learning rate again, because both make steps larger."""
PAIRS: Axis = tuple(
    {"alpha": alpha, "beta": beta, "gamma": gamma}
    for alpha, beta, gamma in (
        (0.5, 0.7, 0.7),
        (0.5, 0.7, 0.3),
        (0.3, 0.9, 0.9),
        (0.0, 1.0, 1.0),
        (0.7, 0.7, 0.7),
        (0.5, 1.4, 0.7),
    )
)


@dataclass(frozen=True)
class Method:
    """A way to train, as tables of run.toml.

    Attributes:
        axes: what is tuned, one axis after the other; the first values of each are where tuning begins.
        like: the method whose tuned values this one takes instead.
        landing: when results are taken, with overlap: see bench/simulation.py. A site takes one as soon as it is there,
            unless half of the steps are done; 1: at their end.
    """

    outer: dict[str, Any]
    inner: dict[str, Any]
    axes: tuple[Axis, ...] = ()
    like: str = ""
    landing: float = 1.0


def _method(
    axes: tuple[Axis, ...] = (), like: str = "", inner: dict[str, Any] | None = None, landing: float = 1.0, **outer: Any
) -> Method:
    return Method(outer, inner or {}, axes, like, landing)


DILOCO: dict[str, Any] = {"algorithm": "diloco", "start": "solo", "start_fraction": 0.1}
GOSSIP: dict[str, Any] = {"algorithm": "noloco", "start": "solo", "start_fraction": 0.1}
FIFTH: dict[str, Any] = {**DILOCO, "start_fraction": 0.2}
HIDDEN: dict[str, Any] = {"codec": "int4", "fragments": 4, "overlap": True}
MUON: dict[str, Any] = {"optimizer": "muon"}
HIDDEN_MUON = "muon-int4-fragments-overlap"
ANNEALED = "int4-fragments-early-anneal"
EARLY = 0.4
"""A result that is there after this part of the next inner steps: two of five, with four fragments."""
METHODS = {
    "sync": _method((RATES,), algorithm="sync", start="none"),
    "sync-muon": _method((RATES,), inner=MUON, algorithm="sync", start="none"),
    "diloco": _method((RATES, OUTER), algorithm="diloco"),
    "diloco-start": _method((RATES, OUTER), **DILOCO),
    "diloco-start-warmup": _method((RATES, OUTER), **DILOCO, momentum_warmup=True),
    "diloco-sync-start": _method(like="diloco-start", **{**DILOCO, "start": "sync"}),
    "pier-staged": _method((RATES,), algorithm="pier", schedule="staged"),
    "pier-cosine": _method((RATES,), algorithm="pier", schedule="cosine"),
    "bf16": _method(like="diloco-start", **DILOCO, codec="bf16"),
    "int8": _method(like="diloco-start", **DILOCO, codec="int8"),
    "int4": _method(like="diloco-start", **DILOCO, codec="int4"),
    "fragments": _method(like="diloco-start", **DILOCO, fragments=4),
    "overlap": _method((RATES, OUTER), **DILOCO, overlap=True),
    "int4-overlap": _method(like="overlap", **DILOCO, codec="int4", overlap=True),
    "int4-fragments-overlap": _method((RATES, OUTER), **DILOCO, **HIDDEN),
    "int4-overlap-early": _method((RATES, OUTER), landing=0.25, **DILOCO, codec="int4", overlap=True),
    "topk": _method((RATES, SPARSE), **DILOCO, codec="topk"),
    "topk2": _method(like="topk", **DILOCO, codec="topk2"),
    "muon": _method((RATES, OUTER), inner=MUON, **DILOCO),
    "muon-int4-fragments-overlap": _method((RATES, OUTER), inner=MUON, **DILOCO, **HIDDEN),
    "int4-fragments-early": _method((RATES, OUTER), landing=EARLY, **DILOCO, **HIDDEN),
    "int4-fragments-early-fifth": _method(like="int4-fragments-early", landing=EARLY, **FIFTH, **HIDDEN),
    "int4-fragments-early-bf16": _method(
        like="int4-fragments-early", landing=EARLY, residual="bf16", **DILOCO, **HIDDEN
    ),
    ANNEALED: _method((RATES, OUTER), landing=EARLY, schedule="anneal", **DILOCO, **HIDDEN),
    f"{ANNEALED}-h128": _method(like=ANNEALED, landing=EARLY, schedule="anneal", inner_steps=128, **DILOCO, **HIDDEN),
    f"muon-{ANNEALED}-fifth": _method(
        like=HIDDEN_MUON, inner=MUON, landing=EARLY, schedule="anneal", **FIFTH, **HIDDEN
    ),
    "muon-int4-fragments-early": _method(like=HIDDEN_MUON, inner=MUON, landing=EARLY, **DILOCO, **HIDDEN),
    f"muon-{ANNEALED}": _method(like=HIDDEN_MUON, inner=MUON, landing=EARLY, schedule="anneal", **DILOCO, **HIDDEN),
    "noloco": _method((RATES, PAIRS), algorithm="noloco", start="none"),
    "noloco-start": _method((RATES, PAIRS), **GOSSIP),
    "noloco-start-int8": _method(like="noloco-start", **GOSSIP, codec="int8"),
    "noloco-start-int8-overlap": _method(like="noloco-start", landing=0.25, **GOSSIP, codec="int8", overlap=True),
}

FINALISTS = ("sync", "int4-fragments-early", "diloco-start", "pier-staged", "muon-int4-fragments-early", "sync-muon")
TABLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "headline": (
        "short",
        (
            *("sync", "int4-fragments-early", "int4-fragments-early-fifth", "int4-fragments-overlap", "diloco-start"),
            *(HIDDEN_MUON, "muon-int4-fragments-early", f"muon-{ANNEALED}", f"muon-{ANNEALED}-fifth", "sync-muon"),
        ),
    ),
    "methods": ("short", ("sync", "diloco-start", "int4-fragments-overlap", "pier-staged", "pier-cosine")),
    "sparse": ("short", ("sync", "topk", "topk2")),
    "muon": ("short", ("sync", "sync-muon", "muon", HIDDEN_MUON)),
    "pairs": (
        "short",
        ("sync", "noloco-start", "noloco-start-int8", "noloco-start-int8-overlap", "noloco", "diloco-start"),
    ),
    "starts": ("short", ("sync", "diloco-start", "diloco-sync-start", "diloco", "diloco-start-warmup")),
    "codecs": ("short", ("sync", "int4", "overlap", "int4-overlap", "int4-overlap-early", "int8", "bf16", "fragments",
                         "int4-fragments-early-bf16")),
    "long": ("long", FINALISTS),
    "long-end": ("long-end", ("sync", ANNEALED, f"{ANNEALED}-h128", f"muon-{ANNEALED}", "sync-muon")),
    "domains": ("domains", ("sync", "diloco-start", "int4-fragments-early", "noloco-start")),
    "wide": ("wide", ("sync", "diloco-start", "int4-fragments-early", "noloco-start", f"muon-{ANNEALED}")),
}  # fmt: skip
"""Setting and methods of each table, the most valuable first."""


class Cell(NamedTuple):
    """One run."""

    setting: str
    method: str
    values: Values
    seed: int

    @property
    def name(self) -> str:
        """What `named` reads."""
        values = (f"{key}{value:g}" for key, value in self.values.items())
        return "_".join((self.setting, self.method, *values, f"seed{self.seed}"))

    def config(self) -> RunConfig:
        """Its run.toml. Raises ValueError: this version of Pier does not have the method."""
        return SETTINGS[self.setting].config(METHODS[self.method], self.values, self.seed)


def named(name: str) -> Cell:
    """The cell of this name. Raises ValueError."""
    setting, method, *parts, seed = name.split("_")
    pairs = [re.fullmatch(r"([a-z]+)([0-9.e-]+)", part) for part in parts]
    values = {match[1]: float(match[2]) for match in pairs if match}
    number = re.fullmatch(r"seed(\d+)", seed)
    if (
        setting not in SETTINGS
        or method not in METHODS
        or not number
        or None in pairs
        or not values.keys() <= KEYS.keys()
    ):
        raise ValueError(f"{name} is not the name of a cell")
    return Cell(setting, method, values, int(number[1]))


class Found:
    """The cells that exist: files in a folder, read when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[str, dict[str, Any]] = {}

    def get(self, cell: Cell) -> dict[str, Any] | None:
        """What was measured, or None."""
        if cell.name not in self._read:
            try:
                self._read[cell.name] = json.loads((self.folder / f"{cell.name}.json").read_text())
            except FileNotFoundError:
                return None
        return self._read[cell.name]

    def losses(self, setting: str, method: str, values: Values, seeds: Sequence[int]) -> dict[int, float]:
        """Final losses by seed, of those that exist."""
        cells = {seed: self.get(Cell(setting, method, values, seed)) for seed in seeds}
        return {seed: found["loss"] for seed, found in cells.items() if found}

    def trials(self, setting: str, method: str) -> Iterator[list[Values]]:
        """The candidates of each axis, as far as the tuning has come."""
        values: Values = {}
        for axis in METHODS[method].axes:
            values |= axis[0]
        for axis in METHODS[method].axes:
            candidates = [values | candidate for candidate in axis]
            if axis is RATES:
                candidates = [each | {"lr": each["lr"] * SETTINGS[setting].slower} for each in candidates]
            while axis is RATES and (beyond := self._beyond(setting, method, candidates)):
                candidates.append(beyond)
            yield candidates
            values = self._best(setting, method, candidates)

    def _beyond(self, setting: str, method: str, candidates: list[Values]) -> Values | None:
        """The next learning rate, if the best of those that were tried is at an end of them."""
        if not all(self.losses(setting, method, values, TUNING[:1]) for values in candidates):
            return None
        best, rates = self._best(setting, method, candidates), [values["lr"] for values in candidates]
        further = {min(rates): 0.5, max(rates): 2.0}.get(best["lr"])
        return {**best, "lr": best["lr"] * further} if further else None

    def tuned(self, setting: str, method: str) -> Values:
        """The best values so far."""
        where = SETTINGS[setting].tuned_at or setting
        if like := METHODS[method].like:
            return self.tuned(where, like)
        return self._best(where, method, [*self.trials(where, method)][-1])

    def _best(self, setting: str, method: str, candidates: list[Values]) -> Values:
        losses = [(self.losses(setting, method, candidate, TUNING), candidate) for candidate in candidates]
        tried = [(each, candidate) for each, candidate in losses if each]
        if not tried or not (common := set.intersection(*(set(each) for each, _ in tried))):
            return candidates[0]
        means = [fmean(each[seed] for seed in common) for each, _ in tried]
        return tried[means.index(min(means))][1]

    def missing(self, tables: Sequence[str]) -> Iterator[Cell]:
        """What is to be run, in order of value: a first cell of every method, then the second, and so on.

        One setting after the other; what a second seed of the tuning adds comes at the end of it.
        """
        for setting in dict.fromkeys(TABLES[table][0] for table in tables):
            mine = [TABLES[table][1] for table in tables if TABLES[table][0] == setting]
            methods = [*dict.fromkeys(chain(*mine))]
            for seed in TUNING:
                cells = chain(self._tuning(setting, methods, seed), self._reported(setting, methods))
                yield from (cell for cell in cells if self.get(cell) is None)

    def _reported(self, setting: str, methods: Sequence[str]) -> Iterator[Cell]:
        for seed in REPORTED:
            yield from (Cell(setting, method, self.tuned(setting, method), seed) for method in methods)

    def _tuning(self, setting: str, methods: Sequence[str], seed: int) -> Iterator[Cell]:
        where = SETTINGS[setting].tuned_at or setting
        own = dict.fromkeys(METHODS[method].like or method for method in methods)
        trials = [chain(*self.trials(where, method)) for method in own]
        for candidates in zip_longest(*trials):
            chosen = zip(own, candidates, strict=True)
            yield from (Cell(where, method, values, seed) for method, values in chosen if values)
