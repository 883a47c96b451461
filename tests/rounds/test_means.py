"""A site that missed rounds takes their outer steps itself, from the means that other sites have kept."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rounds.cases import config
from wire.memory_carrier import MemoryNet

from pier_node.base.shared import Buffer, SharedVector
from pier_node.config.run import RunConfig
from pier_node.outer.advance import advance
from pier_node.outer.codec import codec
from pier_node.outer.layout import Layout
from pier_node.outer.schedule import round_plan
from pier_node.outer.state import ANCHOR, MOMENTUM, OuterState
from pier_node.rounds.catch_up import Fetched, Tries, Wanted, fetch_state
from pier_node.rounds.exchange_plan import CHUNK
from pier_node.rounds.means import MeanFiles, Means
from pier_node.rounds.reduce import Codes
from pier_node.wire.carrier import BadMessage, Chunk, PeerLost
from pier_node.wire.states import StateServer

LAYOUT = Layout.laid([("weight", (CHUNK + 70_000,))])
CUTS = (0, 1000, 1000 + CHUNK)
"""Where the shards of two members begin, and the chunks of the second."""


def run_of(codec: str = "int4", **outer: Any) -> RunConfig:
    how: dict[str, Any] = {"algorithm": "diloco", "start": "none", "inner_steps": 12, "codec": codec}
    return config(inner={"total_steps": 240, "warmup_steps": 1}, **{**how, **outer})


class Member:
    """A site that takes part in rounds of two, whose means are noise."""

    def __init__(self, net: MemoryNet, run: RunConfig, folder: Path, state: OuterState) -> None:
        self.run, self.state, self.means = run, state, Means.of_site(folder, run, LAYOUT)
        self.asked: list[int] = []
        StateServer(net.join(folder.name), self.offer, mean=self.mean)

    def offer(self, round: int, shadow: bool) -> OuterState | None:
        return self.state if not shadow and round in (0, self.state.round) else None

    def mean(self, round: int) -> Iterator[tuple[int, bytes]]:
        self.asked.append(round)
        return self.means.chunks(round)

    def take(self, plan_round: int, mean: SharedVector, codes: Codes) -> None:
        plan = round_plan(self.run, plan_round)
        self.state = advance(self.state, mean, {"a": 10, "b": 10}, plan, LAYOUT, self.run.inner)
        self.means.keep(plan_round, codes)


def encoded(run: RunConfig, round: int) -> tuple[SharedVector, dict[int, Buffer]]:
    """The mean of a round as everyone decodes it, and its codes."""
    used, part = codec(run.outer.codec), round_plan(run, round).span(LAYOUT.length)
    mean = SharedVector(part.stop - part.start)
    mean.array[:] = np.random.default_rng(round).standard_normal(len(mean.array)).astype(np.float32) * 0.01
    starts = [cut for cut in CUTS if cut < len(mean.array)]
    codes: dict[int, Buffer] = {}
    for start, end in zip(starts, [*starts[1:], len(mean.array)], strict=True):
        codes[start] = used.encode(mean.array[start:end])
        mean.array[start:end] = used.decode(codes[start], end - start)
    return mean, codes


def beginning() -> OuterState:
    vectors = {name: SharedVector(LAYOUT.length) for name in (ANCHOR, MOMENTUM)}
    vectors[ANCHOR].array[:] = np.random.default_rng(0).standard_normal(LAYOUT.length)
    return OuterState(0, ("a", "b"), vectors, {})


def members(net: MemoryNet, run: RunConfig, folder: Path, rounds: int) -> dict[str, Member]:
    """Members a and b after some rounds."""
    found = {name: Member(net, run, folder / name, beginning()) for name in "ab"}
    for round in range(1, rounds + 1):
        for member in found.values():
            mean, codes = encoded(run, round)
            member.take(round, mean, codes)
    return found


async def fetch(net: MemoryNet, run: RunConfig, folder: Path, own: OuterState) -> Fetched:
    """Catch up as site z."""
    tries = Tries(own=own, means=Means.of_site(folder / "z", run, LAYOUT))
    return await fetch_state(net.join("z"), ["a", "b"], Wanted(LAYOUT.length), tries)


def kept(folder: Path) -> list[int]:
    return sorted(int(path.stem.partition("-")[2]) for path in folder.glob("**/*.mean"))


def pieces(net: MemoryNet) -> int:
    return sum(not request.mean for _, request in net.pulled)


@pytest.mark.parametrize(
    "outer",
    [{}, {"codec": "int8"}, {"codec": "bf16"}, {"fragments": 4}, {"algorithm": "pier", "start": "solo"}],
    ids=str,
)
async def test_missed_rounds_are_repeated_to_the_last_bit(outer: dict[str, Any], tmp_path: Path) -> None:
    net, run = MemoryNet(), run_of(**outer)
    first = 3 if "start" in outer else 0  # one behind the start of 10 %
    sites = members(net, run, tmp_path, first)
    own = sites["a"].state
    for round in range(first + 1, first + 4):
        for member in sites.values():
            member.take(round, *encoded(run, round))
    found = (await fetch(net, run, tmp_path, own)).state
    theirs = sites["a"].state
    assert (found.digest, found.ledger, found.members) == (theirs.digest, theirs.ledger, theirs.members)
    assert found.anchor.tobytes() == theirs.anchor.tobytes()
    assert pieces(net) == 0, "nothing of the state itself is fetched"


@pytest.mark.parametrize("codec", ["none", "topk"])
async def test_a_mean_that_is_not_all_of_a_step_is_not_kept(codec: str, tmp_path: Path) -> None:
    net, run = MemoryNet(), run_of(codec)
    sites = members(net, run, tmp_path, 1)
    assert not kept(tmp_path)
    found = (await fetch(net, run, tmp_path, beginning())).state
    assert found.digest == sites["a"].state.digest
    assert pieces(net) > 0
    assert not sites["a"].asked


async def test_a_site_that_is_too_far_behind_fetches_a_state(tmp_path: Path) -> None:
    net, run = MemoryNet(), run_of("bf16")
    sites = members(net, run, tmp_path, 5)
    await fetch(net, run, tmp_path, beginning())
    assert not sites["a"].asked, "the means of five rounds are more bytes than the state"
    assert pieces(net) > 0


async def test_no_more_bytes_of_means_are_kept_than_a_state_has(tmp_path: Path) -> None:
    sites = members(MemoryNet(), run_of("bf16"), tmp_path, 9)
    assert kept(tmp_path / "a") == [7, 8, 9]
    with pytest.raises(BadMessage, match="the mean of round 6 is not here"):
        next(sites["a"].means.chunks(6))


async def test_another_site_has_what_one_lacks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    net, run = MemoryNet(), run_of()
    sites = members(net, run, tmp_path, 3)
    (tmp_path / "a/means/round-00000002.mean").unlink()
    whole = tmp_path / "a/means/round-00000003.mean"
    whole.write_bytes(whole.read_bytes()[:-1])
    assert (await fetch(net, run, tmp_path, beginning())).state.digest == sites["a"].state.digest
    assert pieces(net) == 0
    assert sites["b"].asked == [2, 3]
    assert caplog.messages == [
        "a has no mean of round 2: the mean of round 2 is not here",
        "a has no mean of round 3: the mean of round 3 is damaged here",
        "took the outer steps of the rounds 1 to 3 from their means",
    ]


@settings(max_examples=20, deadline=None)
@given(round=st.integers(1, 3), byte=st.integers(0, 100_000), flip=st.integers(1, 255))
async def test_a_wrong_mean_costs_a_fetch_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, round: int, byte: int, flip: int
) -> None:
    net, run, folder = MemoryNet(), run_of(), tmp_path_factory.mktemp("means")
    sites = members(net, run, folder, 3)

    async def spoil(chunk: Chunk) -> Chunk:
        if chunk.stage == Chunk.STAGE_GATHER and chunk.round == round and chunk.offset == CUTS[1]:
            data = bytearray(chunk.data)
            data[byte] ^= flip
            chunk.data = bytes(data)
        return chunk

    net.spoils = {"a": spoil, "b": spoil}
    assert (await fetch(net, run, folder, beginning())).state.digest == sites["a"].state.digest


async def test_steps_that_lead_elsewhere_are_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What the own state has of the wanted one, all fragments but one, is not fetched even then."""
    net, run = MemoryNet(), run_of(fragments=4)
    sites = members(net, run, tmp_path, 1)
    for site in sites.values():
        site.means.keep(1, encoded(run, 2)[1])
    assert (await fetch(net, run, tmp_path, beginning())).state.digest == sites["a"].state.digest
    assert "the means of the rounds up to 1 that a sent lead to another state" in caplog.text
    assert "the means of the rounds up to 1 that b sent lead to another state" in caplog.text


async def test_one_who_sends_wrong_means_is_found_out_and_the_others_are_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net, run = MemoryNet(), run_of()
    sites = members(net, run, tmp_path, 3)
    sites["a"].means.keep(2, encoded(run, 3)[1])
    assert (await fetch(net, run, tmp_path, beginning())).state.digest == sites["a"].state.digest
    assert pieces(net) == 0
    assert "the means of the rounds up to 3 that a sent lead to another state" in caplog.text


@pytest.mark.parametrize("wrong", [False, True])
async def test_steps_that_are_taken_outlive_a_failed_try_unless_they_were_wrong(tmp_path: Path, wrong: bool) -> None:
    net, run = MemoryNet(), run_of()
    sites = members(net, run, tmp_path, 3)
    (tmp_path / "a/means/round-00000003.mean").unlink()
    if wrong:
        sites["a"].means.keep(2, encoded(run, 3)[1])

    async def die(chunk: Chunk) -> Chunk:
        if chunk.stage == Chunk.STAGE_STATE:
            raise PeerLost("a", "connection reset")
        return chunk

    net.spoils = {"a": die}
    tries = Tries(own=beginning(), means=Means.of_site(tmp_path / "z", run, LAYOUT))
    with pytest.raises(PeerLost):
        await fetch_state(net.join("z"), ["a"], Wanted(LAYOUT.length), tries)
    net.pulled.clear()
    found = await fetch_state(net.join("z"), ["b"], Wanted(LAYOUT.length), tries)
    assert found.state.digest == sites["a"].state.digest
    assert pieces(net) == 0
    assert sites["b"].asked == ([3, 1, 2, 3] if wrong else [3])
    assert tries.ahead is None or not wrong


async def test_a_peer_that_sends_a_mean_too_slowly_is_not_waited_for(tmp_path: Path) -> None:
    net, run = MemoryNet(), run_of()
    sites = members(net, run, tmp_path, 3)

    async def hang(chunk: Chunk) -> Chunk:
        if chunk.stage == Chunk.STAGE_GATHER:
            await asyncio.Event().wait()
        return chunk

    net.spoils = {"a": hang}
    tries = Tries(own=beginning(), means=Means.of_site(tmp_path / "z", run, LAYOUT))
    found = await fetch_state(net.join("z"), ["a", "b"], Wanted(LAYOUT.length), tries, timeout=0.2)
    assert found.state.digest == sites["a"].state.digest
    assert (sites["a"].asked, sites["b"].asked) == ([1], [1, 2, 3])


@pytest.mark.parametrize(
    "chunks",
    [[], [(1000, 1000)], [(0, 1000), (0, 1000)], [(0, CHUNK), (CHUNK + 1, 10)], [(0, 3)], [(0, LAYOUT.length)]],
    ids=str,
)
def test_chunks_that_are_no_mean_are_refused(chunks: list[tuple[int, int]]) -> None:
    used = codec("int4")
    step = Means(run_of(), LAYOUT, MeanFiles(Path("nowhere"), 0)).step(beginning())

    def take() -> OuterState:
        for start, length in chunks:
            step.add(start, used.encode(np.ones(length, np.float32)))
        return step.taken()

    with pytest.raises(BadMessage, match="mean"):
        take()


def test_a_full_disk_is_said_and_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "means").write_text("a file where the folder should be")
    MeanFiles(tmp_path / "means", 100).keep(3, {0: b"code"})
    assert "the mean of round 3 is not kept for sites that missed it" in caplog.text
