"""How fast Pier tokenizes a corpus, compared with the `tokenizers` library alone, alternating on the same cores.

    python -m bench.tokenize

`tokenizers` encodes texts that are already in memory, on all cores with its own threads, and its ids are discarded.
Pier reads the same texts from a file, decides which site trains on them, encodes, and writes shards that survive a
power cut. The tokenizer is a byte-level BPE that is trained here; the text is the standard library's, several times.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import count, cycle, islice
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from pier_node.config.run import DataSection
from pier_node.trainer.data.sources import open_source
from pier_node.trainer.data.tokenizing import BATCH, Text, tokenize, useful_processes


def make_tokenizer(path: Path, texts: list[str], words: int) -> Tokenizer:
    """A byte-level BPE with `words` tokens, trained on some texts."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=words, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(texts, trainer)
    library.save(str(path))
    return library


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and seconds of CPU, that something takes."""
    began, used = time.monotonic(), cpu_seconds()
    work()
    return time.monotonic() - began, cpu_seconds() - used


def main() -> None:
    """Print a row per turn, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=40.0, help="size of the text")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--words", type=int, default=32_000, help="size of the vocabulary")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own = [document.text for document in open_source(DataSection()).documents()]
        library = make_tokenizer(folder / "tokenizer.json", own[::6], options.words)
        texts, size = list[str](), 0
        for text in cycle(own):
            texts.append(text)
            size += len(text.encode())
            if size >= options.mb * 1e6:
                break
        path = folder / "text.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        section = DataSection(source="jsonl", path=str(path), tokenizer=str(folder / "tokenizer.json"))
        corpus, numbers = Text.of(section, 0, 1, None), count()

        def library_alone() -> None:
            some = iter(texts)
            while batch := list(islice(some, BATCH)):
                library.encode_batch_fast(batch, add_special_tokens=False)

        def pier() -> None:
            tokenize(corpus, folder / f"out-{next(numbers)}", lambda *_: None)

        cores = len(os.sched_getaffinity(0))
        load, processes = os.getloadavg()[0], useful_processes(corpus)
        print(f"{size / 1e6:.1f} MB of text, {cores} cores, load {load:.1f}; Pier uses {processes} processes")
        speeds: dict[str, list[float]] = {"tokenizers": [], "pier": []}
        used: dict[str, list[float]] = {"tokenizers": [], "pier": []}
        for turn in range(options.turns):
            both = [("tokenizers", library_alone), ("pier", pier)]
            for who, work in both[:: 1 if turn % 2 else -1]:
                seconds, busy = timed(work)
                speeds[who].append(size / 1e6 / seconds)
                used[who].append(busy)
                print(f"turn {turn + 1}  {who:10}  {speeds[who][-1]:6.2f} MB/s  {busy:6.1f} s of CPU", flush=True)
        alone, ours = (statistics.median(speeds[who]) for who in ("tokenizers", "pier"))
        pairs = statistics.median(own / raw for own, raw in zip(speeds["pier"], speeds["tokenizers"]))
        cpu = statistics.median(used["pier"]) / statistics.median(used["tokenizers"])
        print(f"medians: tokenizers {alone:.2f} MB/s, Pier {ours:.2f} MB/s; of a turn {pairs:.2f}; CPU {cpu:.2f}")


if __name__ == "__main__":
    main()
