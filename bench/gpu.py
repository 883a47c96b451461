"""Pier's own trainer on a GPU: tokens per second, MFU, memory, and how fast weights are published and loaded.

    python -m bench.gpu [--presets gpt2-small,llama-1b] [--seconds 20] [--optimizer adamw]

For GPT-2, Pier alternates with a plain loop like nanoGPT's (bench/trainer.py). For Llama it alternates with
torchtitan, if that is installed; neither model ties its embeddings. All are compiled; Pier's steps without the
compiler follow. The boundary is what a worker does at the end of a round: publish weights and moments to shared
memory, and load them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.torchtitan_step import titans
from bench.trainer import Turn, piers, plain_loop
from pier_node.base.shared import SharedVector
from pier_node.config.run import RunConfig
from pier_node.engine.machines import peak_bytes
from pier_node.trainer import devices
from pier_node.trainer.data.corpus import Windows, open_corpus
from pier_node.trainer.model.cost import flops_per_token
from pier_node.trainer.model.initial import initial_weights
from pier_node.trainer.replica import Replica

BATCHES = {"gpt2-small": 16, "llama-1b": 4}
"""Sequences of an inner step, by preset; 4 for others."""


def pace(turn: Turn, seconds: float, first: int) -> tuple[float, int]:
    """Steps per second, and the number of the next step."""
    began, step = time.perf_counter(), first
    while time.perf_counter() - began < seconds:
        turn(step, step + 5)
        torch.cuda.synchronize()
        step += 5
    return (step - first) / (time.perf_counter() - began), step


def speed(turns: list[Turn], seconds: float, tokens: int) -> list[float]:
    """Best tokens per second of each of three turns, after one that does not count."""
    best, step = [0.0] * len(turns), 0
    for number in range(4):
        for index, turn in enumerate(turns):
            steps, step = pace(turn, seconds / 4, step)
            best[index] = max(best[index], steps * tokens) if number else 0.0
    return best


def boundary(config: RunConfig, device: torch.device) -> tuple[float, float]:
    """GB/s of weights and moments on the way to the daemon and back."""
    replica = Replica(config, device, workers=1)
    replica.load_weights(initial_weights(config.model, 1))
    vectors = [torch.from_numpy(SharedVector(replica.layout.length).array) for _ in range(3)]

    def out() -> None:
        replica.store_weights(vectors[0])
        replica.store_moments(vectors[1], vectors[2])

    def back() -> None:
        replica.load_weights(vectors[0])
        replica.load_moments(vectors[1], vectors[2], 1)
        torch.cuda.synchronize()

    size = 3 * 4 * replica.layout.length / 1e9
    return size / _seconds(out), size / _seconds(back)


def _seconds(what: Callable[[], None]) -> float:
    found = []
    for _ in range(4):
        began = time.perf_counter()
        what()
        found.append(time.perf_counter() - began)
    return min(found[1:])


def peers(config: RunConfig, windows: Windows, device: torch.device) -> dict[str, Turn]:
    """Others' steps with the same model and batches."""
    if config.model.form == "gpt2":
        return {"plain loop": plain_loop(config, windows, device)}
    try:
        return {"torchtitan": titans(config, windows)}
    except ImportError as error:
        print(f"  torchtitan is not measured: {error}")
        return {}


def measure(config: RunConfig, device: torch.device, seconds: float) -> None:
    """Print what the device does with a model."""
    tokens = config.inner.batch_size * config.model.context
    bf16 = devices.uses_bf16(device, "auto")
    full = devices.full_speed(device, 1, bf16, flops_per_token(config.model))
    print(f"{config.model.preset} on {devices.describe(device, 1, bf16)}, {tokens} tokens a step")
    eager = config.model_copy(update={"inner": config.inner.model_copy(update={"compile": False})})
    with tempfile.TemporaryDirectory() as folder:
        windows = Windows(open_corpus(config.data, 0, 1, None, Path(folder)), config.model.context, 1, "site")
        for form in (config, eager):
            turns = {"Pier" if form is config else "Pier, not compiled": piers(form, windows, device)}
            if form is config:
                torch.cuda.reset_peak_memory_stats()
                speed([*turns.values()], 1.0, tokens)
                print(f"  Pier's peak memory: {peak_bytes(device) / 1e9:.1f} GB")
                turns |= peers(config, windows, device)
            rates = speed([*turns.values()], seconds, tokens)
            for name, found in zip(turns, rates):
                mfu = f", MFU {found / full:.1%}" if full else ""
                ratio = f", Pier has {rates[0] / found:.3f} of it" if name not in list(turns)[:1] else ""
                print(f"  {name:20}{found:10,.0f} tokens/s{mfu}{ratio}", flush=True)
            del turns
            torch.cuda.empty_cache()
    out, back = boundary(config, device)
    print(f"  boundary: {out:.1f} GB/s out, {back:.1f} GB/s back", flush=True)


def main() -> None:
    """Measure, and print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default="gpt2-small,llama-1b")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--optimizer", default="adamw")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device here: nothing was measured")
    for preset in options.presets.split(","):
        inner = {"batch_size": BATCHES.get(preset, 4), "optimizer": options.optimizer, "compile": True}
        model = {"preset": preset, "tie_embeddings": preset.startswith("gpt2")}
        config = RunConfig.model_validate({"model": model, "inner": inner})
        measure(config, devices.pick(), options.seconds)


if __name__ == "__main__":
    main()
