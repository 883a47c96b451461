from __future__ import annotations

import asyncio
import gc
import os
import shutil
import subprocess
import tracemalloc
import weakref
from collections.abc import Awaitable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import psutil
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from processes.run import CORPUS, Run

from bench.device_memory import case
from pier_node.base import shared
from pier_node.base.errors import PierError
from pier_node.base.shared import SharedVector
from pier_node.base.units import amount
from pier_node.config.run import RunConfig, load
from pier_node.doctor import machine
from pier_node.doctor.finding import Verdict
from pier_node.doctor.machine import (
    CHECKPOINT_BYTES,
    CODES,
    FAR,
    FLOAT,
    MOMENTS_BYTES,
    SETTING,
    _container_room,
    check_machine,
    disk_finding,
    forgets_idle_links,
    free_disk,
    free_memory,
    held_memory,
    idle_finding,
    memory_finding,
    stage_disk_finding,
    vectors,
    workers_finding,
)
from pier_node.identity.certificates import credentials
from pier_node.identity.node import Identity
from pier_node.outer.layout import Layout
from pier_node.outer.state import ADAM_M, ADAM_V, ANCHOR, MOMENTUM, OuterState
from pier_node.pipeline.stage import stage_layout
from pier_node.rounds.state_store import KEEP, Checkpoint, StateStore
from pier_node.site import daemon as daemon_module
from pier_node.site import replica
from pier_node.site.daemon import Daemon
from pier_node.site.settings import Settings
from pier_node.trainer.parallel import Parallel
from pier_node.wire.carrier import DESCRIBE
from pier_node.wire.grpc.carrier import GrpcCarrier
from pier_proto.v1.peer_pb2 import StateRequest

MILLION = 1_000_000


@pytest.mark.parametrize("sync", [False, True])
def test_a_checkpoint_is_as_large_as_is_said(tmp_path: Path, sync: bool) -> None:
    """With everything in it that may be; what describes it is small."""

    def vector() -> SharedVector:
        made = SharedVector(MILLION)
        made.array[:] = np.random.default_rng(1).standard_normal(MILLION)
        return made

    names = (ANCHOR, MOMENTUM, ADAM_M, ADAM_V) if sync else (ANCHOR, MOMENTUM)
    state = OuterState(1, ("a",), {name: vector() for name in names}, {"a": 1}, int(sync))
    first, second = (None, None) if sync else (vector(), vector())
    folder = StateStore(tmp_path, bytes(32)).save(Checkpoint(state, first, second, 1, 1, 1, vector(), (1,)))
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert size == pytest.approx(CHECKPOINT_BYTES * MILLION, rel=0.01)


def test_enough_disk(tmp_path: Path) -> None:
    finding = disk_finding(tmp_path, RunConfig(), MILLION, free=68 * MILLION)
    assert finding.verdict is Verdict.OK
    needed = (KEEP + 1) * CHECKPOINT_BYTES + MOMENTS_BYTES
    assert finding.values["needed_bytes"] == needed * MILLION == 68 * MILLION
    assert finding.detail == f"checkpoints need 68 MB in {tmp_path}; 68 MB free"


def test_a_codec_needs_more(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"outer": {"codec": "int4"}})
    assert disk_finding(tmp_path, config, MILLION, 0).values["needed_bytes"] == (3 * 24 + 8 + 8) * MILLION


def test_low_disk_says_how_much_to_free(tmp_path: Path) -> None:
    finding = disk_finding(tmp_path, RunConfig(), MILLION, free=58 * MILLION)
    assert finding.verdict is Verdict.PROBLEM
    assert finding.remedy == "Free 10 MB on that disk, or give a --data folder on a larger one."


def test_checkpoints_that_are_there_need_no_more(tmp_path: Path) -> None:
    old = tmp_path / "checkpoints" / "round-00000001" / "state.safetensors"
    old.parent.mkdir(parents=True)
    old.write_bytes(bytes(MILLION))
    finding = disk_finding(tmp_path, RunConfig(), MILLION, free=67 * MILLION)
    assert finding.verdict is Verdict.OK
    assert "67 MB more" in finding.detail
    assert disk_finding(tmp_path, RunConfig(), 10_000, free=0).verdict is Verdict.OK


def pipeline(**tables: dict[str, Any]) -> RunConfig:
    base = {"run": {"sites": 4}, "model": {"preset": "llama-1m"}, "pipeline": {"stages": 4}}
    return RunConfig.model_validate(base | tables)


def test_a_site_of_a_pipeline_keeps_a_stage(tmp_path: Path) -> None:
    """Before it holds one it may get any; those of stage 0 join the whole model in addition."""
    config, settings = pipeline(outer={"algorithm": "sync"}), Settings(tmp_path)
    sizes = [76 * stage_layout(config.model, 4, stage).length for stage in range(4)]
    needs = [sizes[0] + 8 * Layout.of(config.model).length, *sizes[1:]]
    least, most = min(needs), max(needs)
    for free, verdict in ((least - 1, Verdict.PROBLEM), (most - 1, Verdict.ADVICE), (most, Verdict.OK)):
        finding = stage_disk_finding(settings, config, free)
        assert (finding.verdict, finding.values["needed_bytes"]) == (verdict, most)
        assert finding.detail.startswith(f"a stage needs up to {amount(most)} in {tmp_path}; ")
    (tmp_path / "stage-2" / "round-00000001").mkdir(parents=True)
    (tmp_path / "stage-2" / "round-00000001" / "state.safetensors").write_bytes(bytes(1000))
    finding = stage_disk_finding(settings, config, sizes[2] - 1000)
    assert (finding.verdict, finding.values["needed_bytes"]) == (Verdict.OK, sizes[2] - 1000)
    assert finding.detail.startswith(f"stage 2 needs up to {amount(sizes[2] - 1000)} more in {tmp_path}; ")


def test_a_founder_keeps_the_weights_that_it_gives(tmp_path: Path) -> None:
    config = pipeline(run={"sites": 4, "pretrained": True})
    settings = [Settings(tmp_path, weights=weights) for weights in (None, tmp_path)]
    needs = [stage_disk_finding(it, config, 0).values["needed_bytes"] for it in settings]
    assert needs[1] - needs[0] == 8 * Layout.of(config.model).length


def test_a_daemon_may_remove_checkpoints_meanwhile(tmp_path: Path) -> None:
    over = Event()

    def rotate() -> None:
        for number in count():
            folder = tmp_path / "checkpoints" / f"round-{number:08}"
            folder.mkdir(parents=True)
            (folder / "state.safetensors").touch()
            shutil.rmtree(folder)
            if over.is_set():
                return

    with ThreadPoolExecutor(1) as daemon:
        rotating = daemon.submit(rotate)
        try:
            assert all(disk_finding(tmp_path, RunConfig(), MILLION, 0).values for _ in range(1000))
        finally:
            over.set()
        rotating.result()


def test_the_disk_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert free_disk(tmp_path / "not" / "yet") == pytest.approx(free_disk(tmp_path), rel=0.01)
    assert free_disk(tmp_path) > 0


@pytest.mark.parametrize(("forgets", "round_trip"), [(False, 0.2), (True, 0.9 * FAR), (True, 0.0)])
def test_nothing_is_said_when_it_does_not_matter(forgets: bool, round_trip: float) -> None:
    assert idle_finding(forgets, round_trip) == []


def test_what_to_set_is_said() -> None:
    [finding] = idle_finding(True, 0.08)
    assert finding.verdict is Verdict.ADVICE
    assert "80 ms" in finding.detail
    assert finding.remedy == "As root: sysctl -w net.ipv4.tcp_slow_start_after_idle=0"


@pytest.mark.skipif(not Path("/proc/sys/net/ipv4").exists(), reason="no Linux network settings here: NOT tested")
def test_the_setting_is_the_kernels() -> None:
    said = subprocess.run(["sysctl", "-n", SETTING], capture_output=True, text=True, check=True).stdout
    assert forgets_idle_links() is (said.strip() == "1")


DILOCO = RunConfig.model_validate({"outer": {"algorithm": "diloco"}})
CODED = 4.25 / 32
"""Int4."""
SYNC = RunConfig.model_validate({"outer": {"algorithm": "sync"}})


def test_vectors_of_the_algorithms() -> None:
    assert (vectors(DILOCO).usual, vectors(DILOCO).most) == (6, 9)
    assert (vectors(RunConfig()).usual, vectors(RunConfig()).most) == (6, 9)
    assert (vectors(SYNC).usual, vectors(SYNC).most) == (10, 15)
    pairs = [RunConfig.model_validate({"outer": {"algorithm": "noloco", "noloco": {"gamma": g}}}) for g in (0.7, 0.3)]
    assert [(vectors(it).usual, vectors(it).most) for it in pairs] == [(7, 10), (8, 13)]
    synchronous_start = RunConfig.model_validate({"outer": {"start": "sync"}})
    assert vectors(synchronous_start).usual == 10
    parts = RunConfig.model_validate({"outer": {"fragments": 5, "codec": "int4"}})
    assert vectors(parts).usual == pytest.approx(6 + 2 + (2 + CODED) / 5)  # start, residual; mean, error, its codes
    halved = RunConfig.model_validate({"outer": {"fragments": 5, "codec": "int4", "residual": "bf16"}})
    assert vectors(halved).usual == pytest.approx(6 + 2 - 0.5 + (2 - 0.5 + CODED) / 5)


def test_enough_memory() -> None:
    finding = memory_finding(DILOCO, MILLION, cpu_workers=0, held=0, free=36 * MILLION)
    assert finding.verdict is Verdict.OK
    assert finding.detail == "up to 36 MB needed when sites exchange; 36 MB free"
    assert finding.values["bytes_per_parameter"] == 36


@pytest.mark.parametrize(
    ("free", "verdict"), [(32, Verdict.ADVICE), (24, Verdict.ADVICE), (23, Verdict.PROBLEM), (0, Verdict.PROBLEM)]
)
def test_too_little_memory(free: int, verdict: Verdict) -> None:
    finding = memory_finding(DILOCO, MILLION, cpu_workers=0, held=0, free=free * MILLION)
    assert finding.verdict is verdict
    assert f"Free {36 - free} MB of memory here" in finding.remedy


@pytest.mark.parametrize(
    ("disk", "memory", "problem"), [(0, 10**12, "too little disk: "), (10**12, 0, "too little memory: ")]
)
def test_a_site_without_room_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: int, memory: int, problem: str
) -> None:
    monkeypatch.setattr(machine, "free_disk", lambda _: disk)
    monkeypatch.setattr(machine, "free_memory", lambda: memory)
    monkeypatch.setattr(machine, "DRIVERS", ())
    with pytest.raises(PierError, match=problem) as caught:
        check_machine(DILOCO, Settings(tmp_path))
    assert caught.value.remedy.startswith("Free ")
    check_machine(RunConfig.model_validate({"run": {"sites": 2}, "pipeline": {"stages": 2}}), Settings(tmp_path))


def test_a_site_that_may_run_out_of_memory_is_warned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parameters = Layout.of_run(DILOCO).length
    monkeypatch.setattr(machine, "free_memory", lambda: (FLOAT * vectors(DILOCO).usual + 2 * 16) * parameters)
    monkeypatch.setattr(machine, "DRIVERS", ())
    check_machine(DILOCO, Settings(tmp_path, workers=2))
    [said] = caplog.messages
    assert said.startswith("memory: up to ")
    assert "Free " in said


@pytest.mark.processes
def test_gpus_are_looked_at_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ProcessPoolExecutor] = []

    class Counted(ProcessPoolExecutor):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            asked.append(self)

    monkeypatch.setattr(machine, "DRIVERS", (tmp_path,))
    monkeypatch.setattr(machine, "ProcessPoolExecutor", Counted)
    check_machine(DILOCO, Settings(tmp_path))
    assert len(asked) == 1


def test_gpus_that_cannot_be_looked_at_stop_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Dying:
        def __init__(self, *_: Any) -> None:
            raise RuntimeError("CUDA is out of memory")

    monkeypatch.setattr(machine, "DRIVERS", (tmp_path,))
    monkeypatch.setattr(machine, "ProcessPoolExecutor", Dying)
    check_machine(DILOCO, Settings(tmp_path))
    assert "CUDA is out of memory" in caplog.text


def test_workers_on_the_cpu_need_theirs_and_a_daemon_that_runs_has_some() -> None:
    with_workers = memory_finding(DILOCO, MILLION, cpu_workers=2, held=0, free=10**9)
    assert with_workers.values["most_bytes"] == (36 + 2 * 16) * MILLION
    running = memory_finding(DILOCO, MILLION, cpu_workers=0, held=16 * MILLION, free=20 * MILLION)
    assert running.verdict is Verdict.OK
    assert "up to 20 MB more needed" in running.detail


def test_a_daemons_vectors_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "pool", shared.Pool())  # no spares of other tests make room for this vector
    before = held_memory(os.getpid())
    vector = SharedVector(MILLION)
    vector.array[:] = 1
    assert held_memory(os.getpid()) - before == pytest.approx(4 * MILLION, abs=8192)


def test_a_daemon_that_has_ended_holds_nothing() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert held_memory(ended.pid) == 0


def test_a_container_has_less_than_its_machine(tmp_path: Path) -> None:
    assert _container_room(tmp_path) == []
    (tmp_path / "memory.max").write_text("max\n")
    assert _container_room(tmp_path) == []
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 300000\n")
    assert _container_room(tmp_path) == [400_000]
    assert 0 < free_memory() <= psutil.virtual_memory().total


# --- measured on a real daemon -----------------------------------------------------------------


TABLE = 1024
"""Elements of shared memory that are no vector of the model's: the table of the trainer's ranks."""


@pytest.mark.parametrize(("memory", "verdict"), [(80 * 10**9, Verdict.OK), (4 * 10**9, Verdict.PROBLEM)])
def test_workers_are_told_how_they_share_the_model(memory: int, verdict: Verdict) -> None:
    config = case("llama-7b", 32, 8)
    finding = workers_finding(config, Parallel(), 8, memory, True, 10e9)
    assert finding.verdict is verdict
    assert "8 with 1/8 of the model each (fsdp, checkpointing" in finding.detail
    assert finding.values["boundary_seconds"] == pytest.approx(1.35, rel=0.01)


class Meter:
    """Counts the elements of all shared vectors of this process while they are mapped; those of files do not count."""

    def __init__(self) -> None:
        meter, self.now, self.peak = self, 0, 0

        class Counted(shared.Memory):
            def __init__(self, file: int, length: int) -> None:
                super().__init__(file, length)
                if length > TABLE and "memfd:" in str(Path(self.path).readlink()):
                    meter.count(self)

        self.memory = Counted

    def count(self, memory: shared.Memory) -> None:
        self.now += len(memory.array)
        self.peak = max(self.peak, self.now)
        weakref.finalize(memory.array.base, self._gone, len(memory.array))

    def _gone(self, length: int) -> None:
        self.now -= length


class Measured:
    """A daemon in this process, whose private vectors are counted after each round; a newcomer asks it at `ask_at`."""

    def __init__(self, settings: Settings, run: Run, meter: Meter, ask_at: int) -> None:
        self._daemon = Daemon(settings, lambda _: None)
        self._run, self._meter, self._ask_at = run, meter, ask_at
        self.length = Layout.of(load(run.path).model).length
        self.usual = self.private = 0.0

    @property
    def most(self) -> float:
        """The most vectors that it has held."""
        return self.private + self._meter.peak / self.length

    async def run(self, patched: pytest.MonkeyPatch) -> None:
        """See Daemon."""
        measured = self

        class MeasuredReplica(replica.Replica):
            async def _keep(self, state: OuterState) -> None:
                measured.count()  # the update is still there
                await super()._keep(state)

            async def committed(self, checkpoint: Checkpoint, kept: Awaitable[object]) -> None:
                measured.count()
                await super().committed(checkpoint, kept)
                await measured.saved(checkpoint.state.round)

        async def prepare(*parts: Any) -> replica.Replica:
            made = await replica.prepare(*parts)
            tracemalloc.start()
            return made

        patched.setattr(replica, "Replica", MeasuredReplica)
        patched.setattr(daemon_module, "prepare", prepare)
        await self._daemon.run()

    def count(self) -> None:
        """Count the vectors that are no shared ones."""
        sizes = [trace.size for trace in tracemalloc.take_snapshot().traces]
        self.private = max(self.private, sizes.count(FLOAT * self.length) + sizes.count(2 * self.length) / 2)

    async def saved(self, round: int) -> None:
        """A round's checkpoint is on disk."""
        if round == self._ask_at:
            self.usual = self.most
            await self._be_asked()

    async def _be_asked(self) -> None:
        """What a newcomer begins with; it has the state held for it a while."""
        newcomer, site = Identity(ec.generate_private_key(ec.SECP256R1())), self._run.sites[0]
        run_hash, proof = load(self._run.path).hash(), credentials(newcomer, self._run.token)
        carrier = GrpcCarrier(newcomer.node, run_hash, proof)
        carrier.introduce(site.node, site.address)
        await carrier.call(site.node, DESCRIBE, StateRequest(), 60.0)
        await carrier.stop()


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Meter:
    gc.collect()  # what an earlier daemon leaves in a cycle would become spare memory of this one
    made = Meter()
    monkeypatch.setattr(shared, "Memory", made.memory)
    monkeypatch.setattr(shared, "pool", shared.Pool())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return made


def settings(run: Run) -> Settings:
    site, given = run.sites[0], str(run.token)
    return Settings(site.folder, run=run.path, token=given, listen=site.address, data=str(CORPUS), workers=1)


@pytest.mark.processes
@pytest.mark.parametrize(
    "outer",
    [
        {"algorithm": "diloco"},
        {"algorithm": "pier", "start": "sync"},
        {"algorithm": "diloco", "codec": "int8"},
        {"algorithm": "diloco", "codec": "int8", "residual": "bf16"},
        {"algorithm": "diloco", "codec": "int4", "overlap": True},
    ],
)
async def test_a_daemon_holds_what_is_said(
    tmp_path: Path, meter: Meter, monkeypatch: pytest.MonkeyPatch, outer: dict[str, Any]
) -> None:
    """Exactly that in every round, and no more when somebody joins."""
    run = Run(tmp_path, 1, inner={"total_steps": 40}, outer={"start_fraction": 0.2, **outer})
    said = vectors(load(run.path))
    ask_at = 4 if outer.get("overlap") else 2  # at the end nothing is under way that is not kept yet
    daemon = Measured(settings(run), run, meter, ask_at)
    try:
        await asyncio.wait_for(daemon.run(monkeypatch), 300)
    finally:
        tracemalloc.stop()
    if outer.get("overlap"):  # what is there when a round is saved depends on how far the next one is
        assert daemon.usual <= said.usual
    else:
        assert daemon.usual == said.usual - said.always.get(CODES, 0) < daemon.most
    assert daemon.most <= said.most
