"""Checks of this machine: memory of devices and host, and disk space, that a site needs, and a kernel setting.

A site makes those whose failure it could not repair once it trains before it starts: see check_machine.

The outer state is in the daemon's memory in fp32, as vectors with one element per parameter; `vectors` counts them. By
default, Linux forgets the speed of an idle connection (`net.ipv4.tcp_slow_start_after_idle`, see tcp(7)), so each round
starts slowly on a line with latency. docs/operations.md, slow links, has the cost.

How long the daemon computes at the boundary of a round is measured now, with a small model that takes what a round
takes: what was learned, the code of it, the outer step, the digest of the new state. Each value is encoded once and
decoded three times: for the residual, for the mean, and as a mean. Its time grows with the model.
"""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import psutil

from pier_node.base.errors import PierError
from pier_node.base.shared import SharedVector
from pier_node.base.units import amount, seconds
from pier_node.config.run import RunConfig
from pier_node.doctor.finding import THIS_SITE, Finding, Verdict
from pier_node.gossip.exchange import HELD
from pier_node.outer.advance import advance, advance_pair, get_ready
from pier_node.outer.codec import codec
from pier_node.outer.layout import Layout
from pier_node.outer.noloco import needs_anchors
from pier_node.outer.schedule import Kind, round_plan, total_rounds
from pier_node.outer.state import ANCHOR, MOMENTUM, OuterState, in_pieces
from pier_node.rounds.means import MEANS, STATE_BYTES
from pier_node.rounds.prediction import mean_bytes
from pier_node.rounds.state_store import CHECKPOINTS, KEEP, RESIDUAL
from pier_node.site.error_feedback import UnsentUpdate
from pier_node.site.settings import Settings
from pier_node.trainer.model.cost import STATE, USABLE, chosen, device_bytes
from pier_node.trainer.parallel import Parallel

CHECKPOINT_BYTES = 20
"""Maximum bytes per parameter of a checkpoint: anchor, momentum, AdamW's two moments and the unsent update, in fp32."""
MOMENTS_BYTES = 8
"""Bytes per parameter of the moments that a program publishes, which are in files of the data folder."""
WHOLE_BYTES = 8
"""Bytes per parameter of a pipeline's whole model, given or joined: weights and momentum."""
FLOAT = 4
"""Bytes of a value in fp32."""
DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
"""One of them is there where a GPU's driver runs, NVIDIA's or AMD's."""

log = logging.getLogger(__name__)


def check_machine(config: RunConfig, settings: Settings) -> None:
    """Check that this machine can hold a replica, before its site joins; log a warning of what may go wrong.

    Raises:
        PierError: the disk or the memory is too small, or there are more workers than GPUs.
    """
    if config.pipeline.stages > 1:  # a site holds a stage, and which one is settled later
        return
    parameters, workers = Layout.of_run(config).length, list[Finding]()
    gpus = not config.program and any(driver.exists() for driver in DRIVERS)
    if gpus:  # PyTorch looks at them, which takes memory that this process keeps free
        try:
            with ProcessPoolExecutor(1, get_context("spawn")) as other:
                workers = other.submit(workers_findings, config, settings).result()
        except RuntimeError as error:  # of CUDA, or because that process has died
            log.warning("the GPUs cannot be looked at before the start: %s", error)
    room = [
        disk_finding(settings.folder, config, parameters, free_disk(settings.folder)),
        memory_finding(config, parameters, 0 if gpus else cpu_workers(config, settings), 0, free_memory()),
    ]
    for finding in room:
        if finding.verdict is Verdict.PROBLEM:
            raise PierError(f"too little {finding.check}: {finding.detail}", finding.remedy)
    for finding in (*room, *workers):
        if finding.remedy:
            log.warning("%s: %s. %s", finding.check, finding.detail, finding.remedy)


def cpu_workers(config: RunConfig, settings: Settings) -> int:
    """How many workers this site starts on the CPU if it has no GPU; a program's processes are not Pier's to count."""
    return 0 if config.program else settings.workers or 1


def disk_finding(folder: Path, config: RunConfig, parameters: int, free: int, running: bool = False) -> Finding:
    """Whether the disk has room for the checkpoints that are kept and the one being written, besides existing ones.

    With a codec a checkpoint has its residual, too, and the means of the last rounds are kept.

    Args:
        free: bytes on the folder's disk.
        running: a daemon has reserved room for the moments.
    """
    there = sum(_bytes_in(folder / name) for name in (CHECKPOINTS, MEANS))
    coded = config.outer.codec != "none"
    each = (KEEP + 1) * (CHECKPOINT_BYTES + FLOAT * coded) + STATE_BYTES * coded
    if config.program is None and not running:
        each += MOMENTS_BYTES
    needed = max(0, each * parameters - there)
    detail = f"checkpoints need {amount(needed)} {'more ' if there else ''}in {folder}"
    return _room(detail, needed, needed, free)


def stage_disk_finding(settings: Settings, config: RunConfig, free: int) -> Finding:
    """Whether the disk has room for the stage that this site holds or, before it holds one, for any.

    A founder that has the run's weights keeps them; the sites of stage 0 join the whole model at the end.

    Args:
        free: bytes on the disk of the site's folder.
    """
    from pier_node.pipeline import beginnings, stage_state  # they load PyTorch
    from pier_node.pipeline.stage import stage_layout

    folder, each, stages = settings.folder, stage_state.disk_bytes(config), config.pipeline.stages
    held, whole = stage_state.StageState(folder, config).stage, WHOLE_BYTES * Layout.of(config.model).length
    parts = (*folder.glob("stage-*"), *(folder / it for it in ("own", RESIDUAL, CHECKPOINTS, beginnings.FOLDER)))
    there, given = sum(map(_bytes_in, parts)), whole if config.begins_pretrained and settings.weights else 0
    needs = [
        max(0, each * stage_layout(config.model, stages, it).length + whole * (it == 0) + given - there)
        for it in (range(stages) if held is None else [held])
    ]
    detail = f"{'a stage' if held is None else f'stage {held}'} needs up to {amount(max(needs))}"
    return _room(f"{detail} {'more ' if there else ''}in {folder}", min(needs), max(needs), free)


def _room(needs: str, least: int, most: int, free: int) -> Finding:
    """Whether the disk has room for what needs between `least` and `most` bytes."""
    detail, values = f"{needs}; {amount(free)} free", {"needed_bytes": most, "free_bytes": free}
    if free >= most:
        return Finding(THIS_SITE, "disk", Verdict.OK, detail, "", values)
    remedy = f"Free {amount(most - free)} on that disk, or give a --data folder on a larger one."
    return Finding(THIS_SITE, "disk", Verdict.ADVICE if free >= least else Verdict.PROBLEM, detail, remedy, values)


def _bytes_in(folder: Path) -> int:
    """Bytes of all files in a folder and below; a daemon may be removing some of them."""
    found = 0
    for inside, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                found += Path(inside, name).stat().st_size
    return found


def free_disk(folder: Path) -> int:
    """Free bytes on the disk of a folder, which may not exist yet."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return int(psutil.disk_usage(str(there)).free)


SETTING = "net.ipv4.tcp_slow_start_after_idle"
FAR = 0.03
"""Round trip in seconds from which regaining speed takes a noticeable part of a round."""


def idle_finding(forgets: bool, round_trip: float) -> list[Finding]:
    """Advice on the kernel setting, if it matters.

    Args:
        forgets: whether the kernel forgets the speed of idle connections, its default.
        round_trip: of the farthest peer, in seconds.
    """
    if not forgets or round_trip < FAR:
        return []
    detail = f"each round begins slowly: {SETTING} is 1, and the farthest peer is {1000 * round_trip:.0f} ms away"
    return [Finding(THIS_SITE, "idle links", Verdict.ADVICE, detail, f"As root: sysctl -w {SETTING}=0")]


def forgets_idle_links() -> bool:
    """Whether the kernel of this machine, or the network of this container, has that setting."""
    try:
        return Path("/proc/sys", *SETTING.split(".")).read_text().strip() == "1"
    except OSError:
        return False


CODES = "mean as it travels"
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Vectors:
    """How many vectors of a whole model the daemon holds at once.

    Attributes:
        always: by purpose, at the end of every round.
        at_times: additional ones: a round continued without this site; a newcomer fetches the run's state from it.
    """

    always: dict[str, float]
    at_times: dict[str, float]

    @property
    def usual(self) -> float:
        """The number in every round."""
        return sum(self.always.values())

    @property
    def most(self) -> float:
        """The number if everything coincides."""
        return self.usual + sum(self.at_times.values())


def vectors(config: RunConfig) -> Vectors:
    """The vectors that the daemon holds: docs/engine.md says what each is for."""
    outer = config.outer
    state = 4 if "sync" in (outer.algorithm, outer.start) else 2
    anchors = outer.algorithm == "noloco" and needs_anchors(outer.noloco)
    fragment = 1 / outer.fragments
    always: dict[str, float] = {"state": state, "shadow": state, "outbox": 1, "pending": 1}
    at_times: dict[str, float] = {"state that is served": state}
    if outer.algorithm == "noloco":
        always["means"] = 2 if anchors else 1
    elif outer.fragments > 1:
        always["mean"] = fragment
    if anchors:
        at_times["anchors of partners"] = HELD
    if outer.overlap:
        at_times["state that is being written"] = state
    (always if outer.overlap or outer.fragments > 1 else at_times)["start from pending"] = 1
    if outer.codec != "none":
        each = 0.5 if outer.residual == "bf16" else 1
        always |= {"residual": each, "error": each * fragment}
        if outer.algorithm == "noloco":
            always["update"] = 1
        else:
            always[CODES] = mean_bytes(config, config.run.sites) / FLOAT * fragment
    return Vectors(always, at_times)


def memory_finding(config: RunConfig, parameters: int, cpu_workers: int, held: int, free: int) -> Finding:
    """Whether the memory is sufficient.

    Args:
        cpu_workers: workers of this site that are still to be started on the CPU.
        held: bytes of this memory that a running daemon already uses.
        free: bytes.
    """
    copies = vectors(config)
    workers = STATE * parameters * cpu_workers
    usual, most = (
        max(0, round(FLOAT * parameters * number) - held) + workers for number in (copies.usual, copies.most)
    )
    detail = f"up to {amount(most)} {'more ' if held else ''}needed when sites exchange; {amount(free)} free"
    values = {
        "usual_bytes": usual,
        "most_bytes": most,
        "free_bytes": free,
        "bytes_per_parameter": FLOAT * copies.most,
    }
    if free >= most:
        return Finding(THIS_SITE, "memory", Verdict.OK, detail, "", values)
    verdict = Verdict.ADVICE if free >= usual else Verdict.PROBLEM
    remedy = (
        f"Free {amount(most - free)} of memory here, or run a smaller model: the daemon holds up to {copies.most:g} "
        f"fp32 copies of it ({FLOAT * copies.most:g} bytes a parameter)."
    )
    return Finding(THIS_SITE, "memory", verdict, detail, remedy, values)


def workers_findings(config: RunConfig, settings: Settings) -> list[Finding]:
    """The workers of this site, if they share whole models. Loads PyTorch. Raises PierError: they cannot be started."""
    if config.program or config.pipeline.stages > 1:
        return []
    from pier_node.trainer import devices

    workers = settings.workers or devices.count()
    device = devices.pick(0, workers)
    bf16 = devices.uses_bf16(device, config.inner.precision)
    settings.parallel.check(config, workers)
    return [workers_finding(config, settings.parallel, workers, devices.memory(), bf16, devices.copy_rate(device))]


HANDED = 16
"""Bytes per parameter that workers hand to the daemon after their inner steps, with AdamW's moments, and load again."""


def workers_finding(
    config: RunConfig, parallel: Parallel, workers: int, memory: int, bf16: bool, rate: float
) -> Finding:
    """How the workers share the model, whether their devices hold it, and how long they are idle between rounds.

    Args:
        parallel: what the site is started with.
        memory: bytes of the smallest device; 0: workers compute on the CPU.
        bf16: they compute in bfloat16.
        rate: of copies between host and device, in bytes per second.
    """
    way = chosen(parallel, config, workers, memory, bf16)
    needed, parts = device_bytes(config, way, workers, bf16), way.parts(workers)
    seconds = HANDED * Layout.of(config.model).length / parts / rate
    mode = way.mode + (f", tensor {way.tensor}" if way.tensor > 1 else "")
    room = f"{amount(needed)} of {amount(memory)} on each GPU" if memory else f"{amount(needed)} of memory each"
    detail = (
        f"{workers} with 1/{parts} of the model each ({mode}, checkpointing {way.checkpointing}): {room}; "
        f"about {seconds:.2g} s of a round to hand over weights"
    )
    values = {"device_bytes": needed, "boundary_seconds": seconds, "parts": parts}
    if not memory or needed <= USABLE * memory:
        return Finding(THIS_SITE, "workers", Verdict.OK, detail, "", values)
    remedy = (
        "Start this node with --parallel fsdp and --checkpointing full, on more GPUs, or with --tensor; or lower "
        "inner.micro_batch before the run begins."
    )
    return Finding(THIS_SITE, "workers", Verdict.PROBLEM, detail, remedy, values)


def free_memory() -> int:
    """Available bytes of the machine, or of the container if it has a limit."""
    return min([psutil.virtual_memory().available, *_container_room(_CGROUP)])


def held_memory(pid: int) -> int:
    """Bytes of shared memory in a daemon: its vectors; 0: it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssShmem:"):
                return int(line.split()[1]) * 1024
    return 0


def _container_room(cgroup: Path) -> list[int]:
    """Bytes left by a limit of control groups (version 2); [] without one. Cached files do not count as used."""
    if not (cgroup / "memory.max").exists() or (limit := (cgroup / "memory.max").read_text().strip()) == "max":
        return []
    stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    used = int((cgroup / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
    return [max(0, int(limit) - used)]


SAMPLE = 1 << 24
"""Values of that model: more than a cache holds, in 64 MB a vector."""
DECODED = 3
"""How often a daemon decodes each value of its model, in a round of any number of sites."""


def boundary_finding(config: RunConfig, parameters: int) -> list[Finding]:
    """What the daemon computes in a round of the run; nothing for synchronous training, which has no rounds."""
    if config.outer.algorithm == "sync":
        return []
    sample = min(SAMPLE, parameters)
    took = measured(config, sample) * parameters / sample
    while_training = ", in part while workers train" if config.outer.overlap else ", while workers wait"
    detail = f"about {seconds(took)} of a round for the daemon's computing (codec {config.outer.codec}){while_training}"
    return [Finding(THIS_SITE, "boundary", Verdict.OK, detail, "", {"daemon_seconds": took})]


def measured(config: RunConfig, length: int) -> float:
    """Seconds that the daemon takes for a round of a model of this length, without fragments."""
    config = config.model_copy(update={"outer": config.outer.model_copy(update={"fragments": 1})})
    get_ready(config)
    plan, used = round_plan(config, total_rounds(config)), codec(config.outer.codec, config.outer.density)
    layout, rates = Layout.laid([("sample", (length,))]), config.outer.noloco
    state = OuterState(0, ("a",), {name: SharedVector(length) for name in (ANCHOR, MOMENTUM)}, {})
    weights = np.random.default_rng(1).standard_normal(length, np.float32)
    unsent = UnsentUpdate(length, 1, lossy=False)

    def code(piece: slice) -> None:
        data = used.encode(sent[piece])
        for _ in range(DECODED):
            mean.array[piece] = used.decode(data, piece.stop - piece.start)

    for _ in range(2):  # in the first, memory is touched for the first time
        mean, began = SharedVector.scratch(length), time.perf_counter()
        unsent.learn(state.anchor, weights, 1)
        sent = weights if plan.kind is Kind.PAIR else unsent.delta.array
        in_pieces(code, length)
        if plan.kind is Kind.PAIR:
            new = advance_pair(state, plan.round, ["a"], [mean.array, state.anchor], {}, rates)
        else:
            new = advance(state, mean, {"a": 1}, plan, layout, config.inner)
        _ = new.digest
    return time.perf_counter() - began
