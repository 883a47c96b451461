from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers

from pier_node.base.errors import PierError
from pier_node.config.run import DataSection, RunConfig
from pier_node.trainer.data import tokenizing as module
from pier_node.trainer.data.corpus import Batch, Corpus, Part, SiteData, Windows, check_data, open_corpus, share
from pier_node.trainer.data.shards import ShardWriter, Stream, TokenManifest
from pier_node.trainer.data.sources import open_source
from pier_node.trainer.data.tokenizing import Text, tokenize

lines = st.lists(st.text(st.characters(codec="ascii", exclude_characters="\n"), min_size=1), min_size=1, max_size=30)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02}.txt").write_text(f"text {number}")
    return folder


def open_slot(data: Path, cache: Path, slot: int = 0, slots: int = 3, **config: Any) -> Corpus:
    section = DataSection(**{"source": "text", "path": str(data), "validation": 0.2, **config})
    return open_corpus(section, slot, slots, None, cache)


def text_of(tokens: Any) -> bytes:
    return bytes(np.asarray(tokens))


def parts(tokens: Any) -> list[str]:
    return text_of(tokens).decode().splitlines()


def folder_of(cache: Path) -> Path:
    [folder] = cache.iterdir()
    return folder


def test_slots_and_validation_cover_everything_once(data: Path, tmp_path: Path) -> None:
    corpora = [open_slot(data, tmp_path / "cache", slot) for slot in range(3)]
    dealt = sum((parts(corpus.train) for corpus in corpora), parts(corpora[0].validation))
    assert sorted(dealt) == sorted(f"text {number}" for number in range(60))
    assert all(len(corpus.train) for corpus in corpora)
    for other in corpora[1:]:
        assert np.array_equal(other.validation, corpora[0].validation)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=lines, slots=st.integers(1, 5), validation=st.sampled_from([0.1, 0.5]))
def test_any_documents_are_dealt_once(tmp_path: Path, texts: list[str], slots: int, validation: float) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = {"source": "jsonl", "validation": validation}
    corpora = [open_slot(path, tmp_path / "cache", slot, slots, **config) for slot in range(slots)]
    counted = Counter(text_of(corpora[0].validation))
    for corpus in corpora:
        counted += Counter(text_of(corpus.train))
    assert counted == Counter("".join(text + "\n" for text in texts).encode())


def test_slots_wrap_around(data: Path, tmp_path: Path) -> None:
    first, again = (open_slot(data, tmp_path / "cache", slot) for slot in (1, 4))
    assert np.array_equal(first.train, again.train)
    folder_of(tmp_path / "cache")


def test_the_same_data_elsewhere_is_dealt_the_same(data: Path, tmp_path: Path) -> None:
    first = open_slot(data, tmp_path / "cache")
    data.rename(tmp_path / "moved")
    config = DataSection(source="text", path="/nowhere", validation=0.2)
    second = open_corpus(config, 0, 3, str(tmp_path / "moved"), tmp_path / "other")
    assert text_of(first.train) == text_of(second.train)
    assert text_of(first.validation) == text_of(second.validation)


def test_a_second_opening_reads_no_document(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_slot(data, tmp_path / "cache")
    monkeypatch.setattr(module, "tokenize", None)
    second = open_slot(data, tmp_path / "cache")
    assert all(isinstance(array, np.memmap) for array in second.train.arrays)
    assert text_of(second.train) == text_of(first.train)


@pytest.mark.parametrize(
    "config", [{"slot": 1}, {"slots": 4}, {"validation": 0.3}, {"path": "longer"}, {"path": "touched"}]
)
def test_whatever_matters_makes_another_cache(data: Path, tmp_path: Path, config: dict[str, Any]) -> None:
    cache = tmp_path / "cache"
    open_slot(data, cache)
    change = config.get("path")
    if change == "longer":
        (data / "00.txt").write_text("text 0 and more")
    if change == "touched":
        os.utime(data / "00.txt", ns=(1, 1))
    open_slot(data, cache, **{key: value for key, value in config.items() if key != "path"})
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("name", ["train-00000.npy", "validation-00000.npy", "manifest.json"])
@pytest.mark.parametrize("harm", ["cut", "flip", "remove"])
def test_damage_is_found_and_mended(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, harm: str
) -> None:
    cache = tmp_path / "cache"
    before = text_of(open_slot(data, cache).train)
    path = folder_of(cache) / name
    content = path.read_bytes()
    path.unlink()
    if harm != "remove":
        path.write_bytes(content[:-3] if harm == "cut" else content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    with caplog.at_level(logging.WARNING):
        assert text_of(open_slot(data, cache).train) == before
    assert ("is damaged; it is made again" in caplog.text) == ((name, harm) != ("manifest.json", "remove"))
    assert path.read_bytes() == content


def test_a_build_that_fails_leaves_nothing(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_the_disk(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    cache = tmp_path / "cache"
    monkeypatch.setattr(ShardWriter, "append", fill_the_disk)
    with pytest.raises(PierError, match="No space left on device") as caught:
        open_slot(data, cache)
    assert "Free some space" in caught.value.remedy
    assert list(cache.iterdir()) == []


def test_of_several_processes_one_tokenizes_and_the_others_wait(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, tokenize, built = tmp_path / "cache", module.tokenize, list[Path]()
    with ThreadPoolExecutor() as pool:
        others: list[Future[Corpus]] = []

        def build(text: Any, folder: Path, told: Any) -> TokenManifest:
            built.append(folder)
            others.extend(pool.submit(open_slot, data, cache) for _ in range(3))
            assert not [other for other in others if other.done()]
            return tokenize(text, folder, told)

        monkeypatch.setattr(module, "tokenize", build)
        first = open_slot(data, cache)
        assert all(text_of(other.result(60).train) == text_of(first.train) for other in others)
    assert len(built) == 1
    folder_of(cache)


def test_one_that_does_not_tokenize_waits_for_the_tokens(data: Path, tmp_path: Path) -> None:
    cache, section = tmp_path / "cache", DataSection(source="text", path=str(data), validation=0.2)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(open_corpus, section, 0, 3, None, cache, tokenizes=False)
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        assert not cache.exists()
        first = open_slot(data, cache)
        assert text_of(waiting.result(60).train) == text_of(first.train)


def test_what_a_killed_process_left_half_made_is_removed(data: Path, tmp_path: Path) -> None:
    left = tmp_path / "cache" / "building-abc"
    left.mkdir(parents=True)
    (left / "train.npy").write_text("half")
    open_slot(data, tmp_path / "cache")
    assert folder_of(tmp_path / "cache").name.startswith("corpus-")


def test_it_tells_how_far_it_is(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "tokenize", partial(module.tokenize, tell=0.0))
    told: list[tuple[int, int]] = []
    section = DataSection(source="text", path=str(data), validation=0.2)
    open_corpus(section, 0, 3, None, tmp_path / "cache", lambda *how_far: told.append(how_far))
    size = sum(path.stat().st_size for path in data.iterdir())
    assert len(told) == 60
    assert [read for read, _ in told] == sorted({read for read, _ in told})
    assert told[-1] == (size, size)
    open_corpus(section, 0, 3, None, tmp_path / "cache", lambda *_: pytest.fail("nothing is tokenized twice"))


def test_a_cache_that_cannot_be_written_is_named(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(PierError, match="file") as caught:
        open_slot(data, tmp_path / "file" / "cache")
    assert "data directory" in caught.value.remedy


def test_data_without_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(PierError, match="no text in it") as caught:
        open_slot(tmp_path / "empty.txt", tmp_path / "cache")
    assert "--dataset PATH" in caught.value.remedy
    assert list((tmp_path / "cache").iterdir()) == []


def word_tokenizer(path: Path, words: int) -> str:
    vocabulary = {f"w{number}": number for number in range(words - 1)} | {"</s>": words - 1}
    library = Library(models.WordLevel(vocabulary, unk_token="w0"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.save(str(path))
    return str(path)


@pytest.mark.parametrize(("words", "kind"), [(256, np.uint8), (257, np.uint16), (65_537, np.uint32)])
def test_tokens_take_as_few_bytes_as_their_ids_need(tmp_path: Path, words: int, kind: type[np.unsignedinteger]) -> None:
    tokenizer = word_tokenizer(tmp_path / "tokenizer.json", words)
    (tmp_path / "a.txt").write_text(f"w1 w{words - 2}")
    corpus = open_slot(tmp_path / "a.txt", tmp_path / "cache", 0, 1, tokenizer=tokenizer, validation=1e-9)
    [tokens] = corpus.train.arrays
    assert tokens.dtype == kind
    assert tokens.tolist() == [1, words - 2, words - 1]
    assert len(corpus.validation) == 0


def test_another_tokenizer_in_the_same_file_makes_another_cache(data: Path, tmp_path: Path) -> None:
    for words in (10, 11):
        tokenizer = word_tokenizer(tmp_path / "tokenizer.json", words)
        open_slot(data, tmp_path / "cache", tokenizer=tokenizer)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_short_file_reaches_every_slot(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("".join(f"line {number}\n" for number in range(40_000)))
    assert path.stat().st_size < 1e6
    corpora = [open_slot(path, tmp_path / "cache", slot, 4, validation=0.05) for slot in range(4)]
    assert min(len(corpus.train) for corpus in corpora) > 20_000
    assert len(corpora[0].validation) > 4_000
    documents = len(list(open_source(DataSection(source="text", path=str(path))).documents()))
    separators = sum(text_of(corpus.train).count(b"\n\n") for corpus in corpora)
    assert 0.8 * documents < separators + text_of(corpora[0].validation).count(b"\n\n") <= documents


CONFIG = RunConfig.model_validate({"run": {"sites": 3}, "data": {"source": "text", "path": "/text", "validation": 0.1}})


def test_data_that_all_sites_have_is_dealt() -> None:
    assert SiteData.of(CONFIG, 1, None, shared=False) == SiteData(1, 3, None)
    assert SiteData.of(CONFIG, 5, "/copy", shared=True) == SiteData(2, 3, "/copy")


def test_a_site_trains_on_all_of_its_own_data(tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / f"{number:03}.txt").write_text(f"text {number}\n")
    own = SiteData.of(CONFIG, 1, str(tmp_path), shared=False)
    corpus = open_corpus(CONFIG.data, own.slot, own.slots, own.path, tmp_path / "cache")
    trained, held_out = (text_of(part).count(b"text") for part in (corpus.train, corpus.validation))
    assert trained + held_out == 200
    assert held_out < 40


@pytest.mark.parametrize(
    ("dataset", "shared", "said"),
    [
        (None, False, "This site trains on part 2 of 3 of data.path = /text, which is the same at every site."),
        ("/own", False, "its own data, /own: all except the 10 % validation split. If every site has a copy"),
        ("/copy", True, "part 2 of 3 of /copy: a copy of the run's data"),
    ],
)
def test_what_it_trains_on_is_said(dataset: str | None, shared: bool, said: str) -> None:
    assert said in SiteData.of(CONFIG, 1, dataset, shared).describe(CONFIG)


def test_a_site_alone_has_all_of_the_built_in_text() -> None:
    config = RunConfig()
    said = "This site trains on all except the 2 % validation split of the built-in text"
    assert SiteData.of(config, 0, None, shared=False).describe(config).startswith(said)


def test_data_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(PierError, match="the data has no text in it"):
        check_data(CONFIG, SiteData(path=str(tmp_path)))


CONTEXT = 8


def corpus_of(train: Any, validation: Any) -> Corpus:
    return Corpus((Part(Stream([train]), Stream([validation])),))


CORPUS = corpus_of(np.arange(5000, dtype=np.uint16), np.arange(10_000, 10_100, dtype=np.uint16))

steps = st.integers(0, 2**40)


def windows(seed: int = 1, node: str = "a", corpus: Corpus = CORPUS) -> Windows:
    return Windows(corpus, CONTEXT, seed, node)


def equal(one: Batch, other: Batch) -> bool:
    return all(np.array_equal(*pair) for pair in zip(one, other, strict=True))


@given(steps, st.integers(1, 40))
def test_targets_are_inputs_one_token_later(step: int, sequences: int) -> None:
    inputs, targets = windows().batch(step, sequences)
    assert inputs.shape == targets.shape == (sequences, CONTEXT)
    assert inputs.dtype == targets.dtype == np.int64
    assert (targets == inputs + 1).all(), "the corpus counts up"
    assert (np.diff(inputs) == 1).all()


@given(steps, st.integers(1, 40), st.integers(1, 8))
def test_workers_rows_join_to_the_batch(step: int, sequences: int, workers: int) -> None:
    parts = [windows().rows(step, *share(sequences, worker, workers)) for worker in range(workers)]
    joined = np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
    assert equal(joined, windows().batch(step, sequences))


@given(st.integers(0, 1000), st.integers(1, 64))
def test_shares_are_all_and_nearly_equal(sequences: int, workers: int) -> None:
    shares = [share(sequences, worker, workers) for worker in range(workers)]
    ends = [first + count for first, count in shares]
    assert [first for first, _ in shares] == [0, *ends[:-1]]
    assert ends[-1] == sequences
    assert max(count for _, count in shares) - min(count for _, count in shares) <= 1


@given(steps, st.integers(1, 20))
def test_a_larger_batch_only_adds_rows(step: int, sequences: int) -> None:
    small, large = windows().batch(step, sequences), windows().batch(step, sequences + 5)
    assert equal(small, (large[0][:sequences], large[1][:sequences]))


def test_seed_node_and_step_each_decide() -> None:
    batch = windows().batch(3, 4)
    assert equal(batch, windows().batch(3, 4))
    assert not equal(batch, windows().batch(4, 4))
    assert not equal(batch, windows(seed=2).batch(3, 4))
    assert not equal(batch, windows(node="b").batch(3, 4))


def test_the_draw_never_changes() -> None:
    inputs, _ = windows().batch(7, 4)
    assert inputs[:, 0].tolist() == [4433, 149, 4185, 3191]


def test_starts_are_spread_over_all_of_the_part() -> None:
    corpus = corpus_of(np.arange(CONTEXT + 10, dtype=np.uint8), np.arange(100))
    first = np.concatenate([windows(corpus=corpus).batch(step, 50)[0][:, 0] for step in range(40)])
    counts = np.bincount(first, minlength=10)
    assert len(counts) == 10
    assert counts.min() > 150
    assert counts.max() < 250


def test_validation_is_even_and_the_same_for_all() -> None:
    batches = windows().validation(3, 4)
    assert [batch[0].shape for batch in batches] == [(4, CONTEXT)] * 3
    starts = np.concatenate([inputs[:, 0] for inputs, _ in batches]) - 10_000
    assert starts.tolist() == [0, 8, 16, 24, 33, 41, 49, 57, 66, 74, 82, 91]
    assert all(equal(*pair) for pair in zip(batches, windows(9, "z").validation(3, 4), strict=True))
    assert all((targets == inputs + 1).all() for inputs, targets in batches)


@pytest.mark.parametrize("workers", [1, 2, 5, 13])
def test_validation_in_small_batches_and_by_several_workers_has_the_same_windows(workers: int) -> None:
    whole = [row for inputs, _ in windows().validation(3, 4) for row in inputs.tolist()]
    shares = [windows().validation(3, 4, 2, worker, workers) for worker in range(workers)]
    batches = [inputs for share in shares for inputs, _ in share]
    assert [row for batch in batches for row in batch.tolist()] == whole
    assert {len(batch) for batch in batches} <= {1, 2}


def test_a_token_that_the_model_lacks_is_refused_where_it_occurs() -> None:
    train = np.zeros(1000, np.uint16)
    train[-1] = 300
    corpus = corpus_of(train, np.full(CONTEXT + 1, 300, np.uint16))
    windows = Windows(corpus, CONTEXT, 1, "a", 301)
    inputs, _ = windows.batch(0, 2)
    assert inputs.max() == 0
    windows = Windows(corpus, CONTEXT, 1, "a", 300)
    assert equal(windows.batch(0, 2), windows.batch(0, 2)), "nothing of this step has it"
    with pytest.raises(PierError, match=r"the data has token 300; model\.vocab_size = 300"):
        windows.validation(1, 1)


def test_a_token_below_zero_is_refused() -> None:
    corpus = corpus_of(np.full(CONTEXT + 1, -100, np.int32), np.zeros(CONTEXT + 1, np.int32))
    with pytest.raises(PierError, match=r"the data has token -100; model\.vocab_size = 300"):
        Windows(corpus, CONTEXT, 1, "a", 300).batch(0, 1)


def test_a_corpus_of_one_window_is_enough() -> None:
    corpus = corpus_of(np.arange(CONTEXT + 1), np.arange(CONTEXT + 1))
    inputs, targets = windows(corpus=corpus).batch(5, 2)
    assert inputs.tolist() == [list(range(CONTEXT))] * 2
    assert targets.tolist() == [list(range(1, CONTEXT + 1))] * 2
    [(inputs, _)] = windows(corpus=corpus).validation(1, 1)
    assert inputs.tolist() == [list(range(CONTEXT))]


@pytest.mark.parametrize(
    ("train", "validation", "problem", "remedy"),
    [
        (CONTEXT, 100, r"the data to train on here has 8 tokens; .*context = 8 needs 9", "run.sites"),
        (0, 100, r"has 0 tokens", "Add text"),
        (100, CONTEXT, r"the validation part of the data has 8 tokens; .* needs 9", "data.validation"),
    ],
)
def test_too_little_text_says_what_to_do(train: int, validation: int, problem: str, remedy: str) -> None:
    with pytest.raises(PierError, match=problem) as caught:
        windows(corpus=corpus_of(np.zeros(train, np.uint8), np.zeros(validation, np.uint8)))
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "validation", "problem"),
    [
        ("short\n", 0.5, "one window of model.context = 32 needs 33"),
        ("a line that is long enough for a window of 32 tokens\n" * 5, 0.0001, "the validation part of the data has 0"),
        ("a line\n" * 100_000, 0.5, ""),
    ],
)
def test_too_little_text_is_found_before_the_run(tmp_path: Path, text: str, validation: float, problem: str) -> None:
    data = {"source": "text", "path": str(tmp_path / "text.txt"), "validation": validation}
    (tmp_path / "text.txt").write_text(text)
    config = RunConfig.model_validate({"data": data, "model": {"context": 32}})
    with pytest.raises(PierError, match=problem) if problem else nullcontext():
        check_data(config, SiteData())


def test_too_few_tokens_are_found_before_the_run(tmp_path: Path) -> None:
    np.arange(200, dtype=np.uint16).tofile(tmp_path / "some.bin")
    data = {"source": "tokens", "path": str(tmp_path), "validation": 0.2}
    config = RunConfig.model_validate({"data": data, "model": {"context": 32}})
    check_data(config, SiteData(0, 4))
    with pytest.raises(PierError, match="the data to train on here has 32 tokens"):
        check_data(config, SiteData(0, 5))


def ids(*ends: int) -> Stream:
    """The ids from each number to the next one, in arrays of their own."""
    return Stream(np.arange(first, end).astype(np.uint32) for first, end in pairwise(ends))


def two_sources(weights: tuple[float, float] = (0.75, 0.25)) -> Corpus:
    """All ids of the first are below 10,000, those of the second are not."""
    parts = (
        Part(ids(0, 5000), ids(0, 100), weights[0], "first"),
        Part(ids(10_000, 11_000, 12_000), ids(10_000, 10_050), weights[1]),
    )
    return Corpus(parts)


def test_rows_of_a_mixture_come_by_weight() -> None:
    mixed = windows(corpus=two_sources())
    first = np.concatenate([mixed.batch(step, 100)[0][:, 0] for step in range(40)])
    assert 0.72 < (first < 10_000).mean() < 0.78
    assert (np.diff(mixed.batch(3, 50)[0]) == 1).all(), "no window mixes sources"


@settings(deadline=None)
@given(steps, st.integers(1, 40), st.integers(1, 8))
def test_a_mixture_is_shared_among_workers_like_one_source(step: int, sequences: int, workers: int) -> None:
    mixed = windows(corpus=two_sources())
    parts = [mixed.rows(step, *share(sequences, worker, workers)) for worker in range(workers)]
    joined = np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
    assert equal(joined, mixed.batch(step, sequences))


@settings(deadline=None)
@given(st.integers(1, 60), st.floats(0.01, 0.99), st.integers(1, 5))
def test_validation_of_a_mixture_has_each_weights_fraction(sequences: int, weight: float, workers: int) -> None:
    mixed = windows(corpus=two_sources((weight, 1 - weight)))
    rows = np.concatenate([inputs for inputs, _ in mixed.validation(2, sequences)])
    assert len(rows) == 2 * sequences
    assert abs((rows[:, 0] < 10_000).sum() - 2 * sequences * weight) <= 1
    shares = [mixed.validation(2, sequences, 3, worker, workers) for worker in range(workers)]
    assert (np.concatenate([inputs for own in shares for inputs, _ in own]) == rows).all()


def test_a_source_that_is_too_small_is_named() -> None:
    small = Part(ids(0, 3), ids(0, 100), 0.5, "data.path = /small")
    with pytest.raises(PierError, match=r"data to train on here \(data\.path = /small\) has 3 tokens"):
        windows(corpus=Corpus((two_sources().parts[0], small)))


def test_sites_that_come_and_go_and_workers_that_change_leave_a_sites_tokens_as_they_are(
    data: Path, tmp_path: Path
) -> None:
    """A site that resumes at any step, with any number of workers, draws what it would have drawn.

    Its part of the data depends on its slot, which it keeps, and on run.sites, not on which sites there are.
    """

    def drawn(cache: str, slot: int, node: str, steps: range, workers: int) -> Any:
        opened = Windows(open_slot(data, tmp_path / cache, slot), CONTEXT, 1, node)
        own = [opened.rows(step, *share(8, worker, workers))[0] for step in steps for worker in range(workers)]
        return np.concatenate(own)

    straight = drawn("cache", 1, "b", range(20), 1)
    drawn("cache", 0, "a", range(5), 1)
    drawn("cache", 2, "c", range(7), 2)
    before, after = drawn("cache", 1, "b", range(13), 2), drawn("another disk", 1, "b", range(13, 20), 3)
    assert np.array_equal(np.concatenate([before, after]), straight)
    again = drawn("another disk", 1, "b", range(13, 20), 1)
    assert np.array_equal(again, after), "a round that is trained again has the same tokens"


def tokens_of(folder: Path, slot: int, slots: int, **keys: Any) -> Corpus:
    config = DataSection(**{"source": "tokens", "path": str(folder), "validation": 0.2, **keys})
    return open_corpus(config, slot, slots, None, folder / "unused")


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(1, 4), st.booleans())
def test_tokens_are_dealt_by_number_and_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], slots: int, held_out: bool
) -> None:
    folder, ids = tmp_path_factory.mktemp("tokens"), np.random.default_rng(1).integers(0, 256, sum(lengths), np.uint8)
    for number, part in enumerate(np.split(ids, np.cumsum(lengths)[:-1])):
        np.save(folder / f"part{number}.npy", part)
    if held_out:
        np.save(folder / "val.npy", np.arange(9, dtype=np.uint8))
    corpora = [tokens_of(folder, slot, slots) for slot in range(slots)]
    dealt = np.concatenate([np.asarray(corpus.train) for corpus in corpora])
    sizes = [len(corpus.train) for corpus in corpora]
    assert max(sizes) - min(sizes) <= 1
    for corpus in corpora:
        last = np.arange(9) if held_out else ids[len(dealt) :]
        assert np.asarray(corpus.validation).tolist() == last.tolist()
    assert dealt.tolist() == ids[: len(dealt)].tolist()
    assert len(dealt) == len(ids) if held_out else len(ids) - len(dealt) == max(1, int(0.2 * len(ids)))


def test_a_site_needs_only_the_shards_that_it_reads(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHARD", 100)
    monkeypatch.setattr(module, "BATCH", 5)
    config = DataSection(source="text", path=str(data), validation=0.2)
    manifest = tokenize(Text.of(config, 0, 1, None), tmp_path / "out", lambda *_: None)
    assert len(manifest.train) >= 4
    whole = np.asarray(tokens_of(tmp_path / "out", 0, 1).train)
    (tmp_path / "out" / manifest.train[0].name).unlink()
    last = tokens_of(tmp_path / "out", 2, 3)
    assert np.asarray(last.train).tolist() == whole[len(whole) * 2 // 3 :].tolist()
    with pytest.raises(PierError, match=r"train-00000\.npy: No such file") as caught:
        tokens_of(tmp_path / "out", 0, 3)
    assert "Copy this shard here" in caught.value.remedy


def test_nanogpts_files_are_read(tmp_path: Path) -> None:
    train, held_out = np.arange(200, dtype=np.uint16), np.arange(50, 90, dtype=np.uint16)
    train.tofile(tmp_path / "train.bin")
    held_out.tofile(tmp_path / "val.bin")
    (tmp_path / "meta.pkl").write_bytes(b"is not read")
    corpus = tokens_of(tmp_path, 1, 2)
    assert np.asarray(corpus.train).tolist() == list(range(100, 200))
    assert np.asarray(corpus.validation).tolist() == held_out.tolist()
    check_data(
        RunConfig.model_validate({"data": {"source": "tokens", "path": str(tmp_path)}, "model": {"context": 32}}),
        SiteData(),
    )


def test_tokens_of_another_tokenizer_are_refused(data: Path, tmp_path: Path) -> None:
    np.arange(0, 3000, 10, dtype=np.uint16).tofile(tmp_path / "train.bin")
    with pytest.raises(PierError, match=r"train\.bin has token 2990; the tokenizer has 256 tokens") as caught:
        tokens_of(tmp_path / "train.bin", 0, 1)
    assert "[data] tokenizer" in caught.value.remedy
    tokenize(Text.of(DataSection(source="text", path=str(data)), 0, 1, None), tmp_path / "out", lambda *_: None)
    with pytest.raises(PierError, match="were made with another tokenizer"):
        tokens_of(tmp_path / "out", 0, 1, tokenizer=word_tokenizer(tmp_path / "tokenizer.json", 10))


@pytest.mark.parametrize(
    ("spoil", "words"), [("unfinished", "are unfinished"), ("torn", "is not JSON"), ("none", "has no tokens")]
)
def test_tokens_that_are_not_there_are_missed_before_the_run(
    data: Path, tmp_path: Path, spoil: str, words: str
) -> None:
    text, out = Text.of(DataSection(source="text", path=str(data)), 0, 1, None), tmp_path / "out"
    out.mkdir()
    (out / "README").touch()
    if spoil != "none":
        text.nothing_yet().save(out)
    if spoil == "torn":
        (out / "manifest.json").write_text("{")
    with pytest.raises(PierError, match=words):
        check_data(RunConfig.model_validate({"data": {"source": "tokens", "path": str(out)}}), SiteData())


def test_private_data_of_each_site_is_not_divided(tmp_path: Path) -> None:
    config = RunConfig.model_validate(
        {"run": {"sites": 3}, "data": {"source": "text", "path": "/own/text", "dealt": False}}
    )
    assert SiteData.of(config, 2, None, shared=False) == SiteData(0, 1, None)
    assert SiteData.of(config, 2, "/other", shared=False) == SiteData(0, 1, "/other")
    said = SiteData.of(config, 2, None, shared=False).describe(config)
    assert said.startswith("This site trains on its own data, data.path = /own/text: all except the 2 % validation")


def test_a_mixture_is_opened_part_by_part_and_own_data_replace_it(data: Path, tmp_path: Path) -> None:
    np.arange(200, dtype=np.uint16).tofile(tmp_path / "some.bin")
    mixture = [
        {"source": "text", "path": str(data), "weight": 3},
        {"source": "tokens", "path": str(tmp_path / "some.bin")},
    ]
    config = RunConfig.model_validate(
        {"data": {"validation": 0.2, "mixture": mixture}, "run": {"sites": 2}, "model": {"context": 16}}
    )
    check_data(config, SiteData())
    corpus = open_corpus(config.data, 1, 2, None, tmp_path / "cache")
    assert [part.weight for part in corpus.parts] == [0.75, 0.25]
    assert np.asarray(corpus.parts[1].train).tolist() == list(range(80, 160))
    assert "part 2 of 2 of a mixture of 2 sources" in SiteData.of(config, 1, None, shared=False).describe(config)
    alone = open_corpus(config.data, 0, 1, str(data / "00.txt"), tmp_path / "cache")
    assert [part.weight for part in alone.parts] == [1.0]
    with pytest.raises(PierError, match="no such file"):
        check_data(config, SiteData(path="/nowhere"))


def test_another_tokenizer_than_that_of_the_run_is_found_before_it(tmp_path: Path) -> None:
    """Sites with other tokens would train on other numbers, and nobody would notice."""

    def of(path: str, wanted: str) -> RunConfig:
        data = {"tokenizer": path, "tokenizer_hash": wanted, "source": "text", "path": str(tmp_path / "text.txt")}
        return RunConfig.model_validate({"data": {**data, "validation": 0.5}, "model": {"context": 32}})

    (tmp_path / "text.txt").write_text("w1 w2\n" * 100_000)
    ours, theirs = (word_tokenizer(tmp_path / f"{words}.json", words) for words in (5, 6))
    wanted = hashlib.sha256(Path(ours).read_bytes()).hexdigest()
    check_data(of(ours, wanted), SiteData())
    check_data(of(theirs, ""), SiteData())
    with pytest.raises(PierError, match="is another file than that of the run") as caught:
        check_data(of(theirs, wanted), SiteData())
    assert "Copy the file of the run's founder" in caught.value.remedy
