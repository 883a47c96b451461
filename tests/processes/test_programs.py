"""Users' own training programs as sites of a run: `pier-node start --exec`, and pier.join with a daemon beside it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from signal import SIGKILL
from typing import Any

import psutil
import pytest
from processes.place import HERE
from processes.program import ENVIRONMENT, Program
from processes.run import check_sites, toml
from processes.simulated import train, train_after_a_thread_has_joined, train_alone, train_and_log, weights
from processes.site import Site, wait_until
from raw_pytorch import Model

import pier
from bench.ports import free_port
from pier_node.rounds.folder import EVENTS_FILE, read_events

pytestmark = pytest.mark.processes

PROGRAM = Path(__file__).with_name("training_program.py")
EXAMPLES = Path(__file__).parents[2] / "examples"
RUNNERS = {"fsdp_tp": ["-m", "torch.distributed.run", "--nproc-per-node", "2"]}
PYTHON = sys.executable
IMPORTS = 800.0
"""Seconds within which a program trains that imports Lightning (14 seconds of a core), on a very busy machine."""
Found = Callable[..., list[Site]]


def command(kind: str, ranks: int = 1, width: int = 10) -> str:
    start = [PYTHON]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
    return shlex.join([*start, str(PROGRAM), kind, str(width)])


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[Found]:
    """Sites of one run, each with a command of its own; the first founds it."""
    made: list[Site] = []

    def found(*commands: str, steps: int = 60, algorithm: str = "diloco") -> list[Site]:
        tables: dict[str, dict[str, Any]] = {
            "run": {"name": "programs", "sites": len(commands)},
            "inner": {"total_steps": steps, "eval_every": 0},
            "outer": {"algorithm": algorithm, "inner_steps": 10},
        }
        run = tmp_path / "run.toml"
        run.write_text(toml(tables))
        for name, each in zip("abc", commands):
            way = ["--run", str(run)]
            if made:
                wait_until("a token", (made[0].folder / "run.token").exists)
                way = ["--peers", made[0].address, "--token", (made[0].folder / "run.token").read_text().strip()]
            site = Site(tmp_path / name, *way, "--exec", each)
            made.append(site)
            site.start()
        return made

    yield found
    for site in made:
        site.kill()


def test_a_program_may_take_its_time_to_save_the_result(sites: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENT, "AFTER_SECONDS", "12")
    (site,) = sites(command("plain"), steps=20)
    assert site.ended() == 0
    assert "RESULT" in site.output


def results(run: list[Site]) -> list[str]:
    return [re.findall(r"RESULT (\S+)", site.output)[-1] for site in run]


@pytest.mark.parametrize(("kind", "ranks"), [("ddp", 2), ("fsdp", 2), ("tp", 2), ("2x2", 4)])
def test_ranks_that_share_a_model_and_a_single_one_are_sites_of_one_run(sites: Found, kind: str, ranks: int) -> None:
    run = sites(command(kind, ranks), command("plain"))
    for site in run:
        assert site.ended() == 0
    check_sites(run, apart=False)
    assert [site.round for site in run] == [6, 6]
    first, second = results(run)
    assert first == second


def test_ranks_on_several_machines_are_one_site(sites: Found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun = [PYTHON, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    first, second = (
        ["env", f"PIER_HOST=machine-{number}", *torchrun, "--node-rank", str(number), str(PROGRAM), "fsdp"]
        for number in range(2)
    )
    other = Program(tmp_path / "other", HERE)
    other.launch(second)
    run = sites(shlex.join(first), command("plain"), steps=40)
    for site in run:
        assert site.ended() == 0
    check_sites(run, apart=False)
    wait_until("the other machine ends too", lambda: not other.running)
    assert other.exit_code == 0
    # The first machine's agent holds torchrun's store; if it leaves first, the other agent logs a broken call.
    others = [line for line in other.output.splitlines() if "torch/distributed/elastic/agent" not in line]
    assert "Traceback" not in "\n".join(others)
    own, plain = results(run)
    assert own == plain


def test_pairs_of_programs_end_near_each_other(sites: Found) -> None:
    run = sites(command("plain"), command("plain"), algorithm="noloco")
    for site in run:
        assert site.ended() == 0
    assert all(float(result) for result in results(run))


def test_a_killed_program_is_started_again_and_its_site_stays_in_the_run(
    sites: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENVIRONMENT, "STEP_SECONDS", "0.02")
    run = sites(command("plain"), command("plain"), steps=120)
    run[1].reach(2)
    (program,) = [each for each in run[1].daemon.children() if str(PROGRAM) in each.cmdline()]
    program.kill()
    for site in run:
        assert site.ended() == 0
    check_sites(run, apart=False)
    assert "it is started again" in run[1].output
    first, second = results(run)
    assert first == second


def test_a_site_whose_weights_are_not_finite_any_more_is_of_use_again_after_a_round(sites: Found) -> None:
    run = sites(command("plain"), f"env NAN_STEP=24 {command('plain')}", steps=80)
    for site in run:
        assert site.ended() == 0
    check_sites(run, apart=False)
    assert run[1].output.count("this site's update is dropped") == 1
    assert re.search(r"training diverged in the inner steps [2-7]\d to [2-7]9", " ".join(run[1].output.split()))
    first, second = results(run)
    assert first == second


def test_with_a_daemon_that_is_killed_its_program_ends_in_seconds_and_says_so(sites: Found) -> None:
    (site,) = sites(command("ddp", 2), steps=1_000_000)
    site.reach(2)
    family = site.daemon.children(recursive=True)
    site.send(SIGKILL)
    gone, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    assert gone
    assert "Pier's daemon has" in site.output
    site.start()
    site.wait("it goes on", lambda: "Resuming at round" in site.output)


def rank(site: Site, number: int) -> psutil.Process:
    """The process of a rank under torchrun."""
    ranks = [each for each in site.daemon.children(recursive=True) if each.environ().get("RANK") == str(number)]
    return next(each for each in ranks if str(PROGRAM) in each.cmdline())


def test_a_rank_that_hangs_is_named_and_its_program_started_again(
    sites: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENVIRONMENT, "STEP_SECONDS", "0.05")
    monkeypatch.setitem(ENVIRONMENT, "PATIENCE_SECONDS", "5")
    run = sites(command("ddp", 2), command("plain"), steps=300)
    run[0].reach(16)  # its pace is known
    hung = rank(run[0], 1)
    hung.suspend()
    run[0].wait("it is started again", lambda: "it is started again" in run[0].output)
    assert f"rank 1 (process {hung.pid}) is stopped" in run[0].output
    for site in run:
        assert site.ended() == 0
    assert not hung.is_running()
    check_sites(run, apart=False)
    first, second = results(run)
    assert first == second


def test_a_program_that_ends_at_once_again_and_again_ends_its_site_with_words(sites: Found) -> None:
    (site,) = sites(shlex.join([PYTHON, "-c", "raise SystemExit(3)"]))
    assert site.ended() == 1
    assert "the training program ends again and again (exit code 3)" in site.output


def test_a_program_that_ends_early_on_purpose_leaves_the_run_and_the_others_finish(sites: Found) -> None:
    first, *others = run = sites(f"env LEAVE_STEP=25 {command('plain')}", command("plain"), command("plain"), steps=80)
    for site in run:
        assert site.ended() == 0
    assert re.search(r"left the run by itself, after inner step \d\d of 80", first.output)
    assert "--exec 'env LEAVE_STEP=25" in " ".join(first.output.split())
    assert "is started again" not in first.output
    assert [site.round for site in others] == [8, 8]
    assert len({*results(others)}) == 1


def test_a_program_of_another_model_is_refused_before_it_takes_part(sites: Found) -> None:
    run = sites(command("plain"), command("plain", width=11), steps=1_000_000)
    assert run[1].ended() == 1
    assert "parameter 1 is 0.weight [11, 6] here and 0.weight [10, 6] in the run" in run[1].output
    assert run[0].running
    assert run[1].round == 0


def test_ctrl_c_ends_a_site_and_its_program(sites: Found) -> None:
    (site,) = sites(command("ddp", 2), steps=1_000_000)
    site.reach(2)
    family = site.daemon.children(recursive=True)
    assert family
    assert site.stop() == 0
    psutil.wait_procs(family, timeout=30)
    assert not [each for each in family if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


class Joined(Site):
    """An example, which starts a daemon beside itself: what runs is its program."""

    def __init__(self, folder: Path, example: str, *options: str) -> None:
        super().__init__(folder)
        runner = [*RUNNERS[example], "--master-port", str(free_port())] if example in RUNNERS else []
        own = ["--data", str(folder), "--listen", self.address]
        self.command = [PYTHON, *runner, str(EXAMPLES / f"{example}.py"), *own, *options]


def test_a_rank_that_dies_under_torchrun_ends_its_site_which_goes_on_when_it_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a"
    site = Site(folder)
    place = {"folder": str(folder), "listen": site.address, "sites": 1}
    monkeypatch.setitem(ENVIRONMENT, "PIER_JOIN", json.dumps(place))
    monkeypatch.setitem(ENVIRONMENT, "STEP_SECONDS", "0.02")
    site.command = shlex.split(command("ddp", 2))
    try:
        site.start()
        site.reach(1)
        rank(site, 1).kill()
        assert site.ended() == 1
        assert "the training program has ended: rank 1" in site.output or "Leaving the run" in site.output
        site.start()  # while its last daemon may still be leaving
        site.wait("it goes on", lambda: "Resuming at round" in site.output)
    finally:
        site.kill()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Callable[..., list[Joined]]]:
    """Two sites of a run, each by an example."""
    made: list[Joined] = []

    def found(examples: tuple[str, str], steps: int) -> list[Joined]:
        first = Joined(tmp_path / "a", examples[0], "--steps", str(steps))
        token = first.folder / "run.token"
        second = Joined(tmp_path / "b", examples[1], "--peers", first.address, "--token-file", str(token))
        made.extend((first, second))
        first.start()
        wait_until("a token", lambda: token.exists() or not first.running, IMPORTS)
        second.start()
        return made

    yield found
    for program in made:
        program.kill()


def both_finish(run: list[Joined], rounds: int) -> None:
    for program in run:
        assert program.ended(IMPORTS) == 0
        assert "the run is over" in program.output
    first, second = (program.digests() for program in run)
    assert first == second
    assert len(first) == rounds


@pytest.mark.smoke
@pytest.mark.timeout(3 * IMPORTS)
def test_two_programs_that_call_join_train_one_model(two: Callable[..., list[Joined]]) -> None:
    run = two(("raw_pytorch", "raw_pytorch"), 80)
    both_finish(run, 8)
    run[0].start()  # of a run that is over, it gets the result again
    assert run[0].ended() == 0
    assert run[0].output.count("the run is over") == 2
    assert pier.load(Model(), run[1].folder) == 8


@pytest.mark.timeout(3 * IMPORTS)
@pytest.mark.parametrize(
    "example", ["hf_trainer", "lightning_module", "accelerate_loop", "lora", "fsdp_tp", "torchtitan_trainer"]
)
def test_every_example_trains_across_sites(two: Callable[..., list[Joined]], example: str) -> None:
    if example == "torchtitan_trainer" and not find_spec("torchtitan"):
        pytest.skip("torchtitan is not installed: its example is NOT tested")
    both_finish(two((example, example), 20), 2)


def test_a_program_whose_daemon_is_killed_says_so_and_goes_on_when_it_is_started_again(
    two: Callable[..., list[Joined]],
) -> None:
    first, second = run = two(("raw_pytorch", "raw_pytorch"), 1_000_000)
    wait_until("some rounds", lambda: len(second.digests()) > 1)
    (daemon,) = second.daemon.children()
    daemon.kill()
    assert second.ended() == 1
    assert "Pier's daemon has ended" in second.output
    assert "Start this site again by the same command" in second.output
    second.start()
    second.rejoin()
    for program in run:
        program.kill()
    common = first.digests().items() & second.digests().items()
    assert {number for number, _ in common} == first.digests().keys() & second.digests().keys()


def test_three_sites_on_one_machine_end_with_one_model(tmp_path: Path) -> None:
    results = pier.simulate(train, 20, sites=3, folder=tmp_path)
    assert sorted(slot for slot, _ in results) == [0, 1, 2]
    assert len({total for _, total in results}) == 1


def test_a_program_hears_how_others_fare_and_what_it_logs_is_in_trackers_and_reports(tmp_path: Path) -> None:
    for number in range(2):
        folder = tmp_path / f"site-{number}"
        folder.mkdir()
        (folder / "site.toml").write_text(f'[log]\ntensorboard = "{tmp_path / "board"}-{number}"\n')
    for number, states in enumerate(pier.simulate(train_and_log, 300, sites=2, folder=tmp_path)):
        assert all(state.step // 5 == state.round for state in states), "a slow site leaves steps out"
        assert {state.slot for state in states} == {number}
        assert states[-1].sites == 2
        assert len(states[-1].losses) == 1
        events = read_events((tmp_path / f"site-{number}" / EVENTS_FILE).read_bytes())
        assert len(events) == 60
        assert [event["metrics"]["own/step"] for event in events] == [5 * event["round"] - 1 for event in events]
        assert events[-1]["metrics"]["stage"] == "warm"
        points = tensorboard_points(next((tmp_path / f"board-{number}").iterdir()), "program/own/step")
        assert points
        assert all(step == value for step, value in points)


def tensorboard_points(folder: Path, name: str) -> list[tuple[int, float]]:
    """The points of a metric: step and value of each."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    written = accumulator.EventAccumulator(str(folder))
    written.Reload()
    return [(event.step, event.tensor_proto.float_val[0]) for event in written.Tensors(name)]


def test_a_site_alone_ends_with_the_bits_of_its_loop_if_the_outer_step_is_the_identity(tmp_path: Path) -> None:
    (found,) = pier.simulate(train_alone, 40, sites=1, folder=tmp_path)
    assert found == train_alone(40, joins=False)


def test_of_a_simulation_the_site_that_failed_is_named(tmp_path: Path) -> None:
    with pytest.raises(pier.PierError, match="a site failed with exit code 1") as failed:
        pier.simulate(train, 1_000_000, 1, sites=2, folder=tmp_path)
    log = Path(failed.value.remedy.removesuffix(" says why."))
    assert "as the test wants it" in log.read_text()


def test_a_daemon_outlives_the_thread_that_has_joined(tmp_path: Path) -> None:
    assert pier.simulate(train_after_a_thread_has_joined, sites=1, folder=tmp_path) == [True]


def test_a_daemon_whose_program_dies_while_it_starts_ends(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as program:
        program.wait()
    words = ("--program-socket", str(tmp_path / "socket"), "--data", str(tmp_path / "data"))
    started = [sys.executable, "-m", "pier_node.cli", "start", *words]
    ended = subprocess.run(started, env={**os.environ, "PIER_PROGRAM": str(program.pid)}, timeout=60, check=False)
    assert ended.returncode == 0


def test_a_simulation_may_return_weights(tmp_path: Path) -> None:
    """Their memory was that of a process that had ended."""
    (found,) = pier.simulate(weights, sites=1, folder=tmp_path)
    assert found["weight"].shape == (1, 4)


def test_a_function_that_sites_cannot_import_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process says more than its site can."""

    def found() -> None:
        pass

    monkeypatch.setattr(found, "__qualname__", "found")
    monkeypatch.setattr(sys.modules[__name__], "found", found, raising=False)
    with pytest.raises(pier.PierError, match="before it called the function"):
        pier.simulate(found, sites=1, folder=tmp_path)


def test_a_function_of_a_notebook_is_refused_before_a_site_starts() -> None:
    script = "import pier\ndef train():\n  pass\npier.simulate(train, sites=1)"
    ended = subprocess.run([PYTHON, "-c", script], capture_output=True, text=True, check=False)
    assert "cannot import train from a notebook" in ended.stderr
    assert "spawn" not in ended.stderr
