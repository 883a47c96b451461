from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rounds.cases import outer_state
from wire.state_cases import vector

from pier_node.base.durable import read_sealed, seal
from pier_node.base.errors import PierError
from pier_node.outer.state import PIECE, OuterState
from pier_node.rounds.state_store import Checkpoint, StateStore

RUN = bytes(range(32))


def checkpoint(round: int = 42, length: int = 1000, sync: bool = False, pending: bool = True) -> Checkpoint:
    names = ["anchor", "momentum", *(["adam_m", "adam_v"] if sync else [])]
    tensors = {name: vector(length, round + number) for number, name in enumerate(names)}
    return Checkpoint(
        state=OuterState(round, ("a", "b"), tensors, {"a": 300, "b": 2**40}, adam_step=round if sync else 0),
        adam_m=None if sync else vector(length, 10),
        adam_v=None if sync else vector(length, 11),
        adam_step=0 if sync else 2100,
        inner_step=2105,
        tokens=10**12,
        pending=vector(length, 12) if pending else None,
        pending_tokens=(640, 0) if pending else (),
    )


def bits(of: Checkpoint) -> tuple[object, ...]:
    """Everything in a checkpoint, by value."""
    vectors = {"adam_m": of.adam_m, "adam_v": of.adam_v, "pending": of.pending, **of.state.tensors}
    arrays = {name: None if shared is None else shared.array.tobytes() for name, shared in vectors.items()}
    state, numbers = of.state, (of.adam_step, of.inner_step, of.tokens, of.pending_tokens)
    return arrays, state.round, state.members, state.ledger, state.adam_step, state.digest, numbers


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("length", [0, 1, 1000, PIECE + 1])
def test_what_is_saved_is_loaded(tmp_path: Path, sync: bool, pending: bool, length: int) -> None:
    saved = checkpoint(length=length, sync=sync, pending=pending)
    path = StateStore(tmp_path / "checkpoints", RUN).save(saved)
    assert path == tmp_path / "checkpoints" / "round-00000042"
    assert names(path) == ["checkpoint.json", "local.safetensors", "state.safetensors"]
    loaded = StateStore(tmp_path / "checkpoints", RUN).newest()
    assert loaded
    assert bits(loaded) == bits(saved)


def test_nothing_saved_is_nothing_loaded(tmp_path: Path) -> None:
    assert StateStore(tmp_path / "checkpoints", RUN).newest() is None


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_rotation_keeps_the_newest(tmp_path: Path, keep: int) -> None:
    store = StateStore(tmp_path, RUN, keep)
    for round in (9, 10, 99_999_999, 100_000_000):
        store.save(checkpoint(round))
    assert names(tmp_path) == sorted(["round-00000010", "round-99999999", "round-100000000"][3 - keep :])
    loaded = store.newest()
    assert loaded
    assert loaded.state.round == 100_000_000


def test_rotation_never_takes_what_was_just_saved(tmp_path: Path) -> None:
    store = StateStore(tmp_path, RUN, keep=1)
    store.save(checkpoint(50))
    store.save(checkpoint(41))
    assert names(tmp_path) == ["round-00000041"]


def test_a_round_can_be_saved_again(tmp_path: Path) -> None:
    store = StateStore(tmp_path, RUN)
    for saved in (checkpoint(41), checkpoint(42, pending=False), checkpoint(42)):
        store.save(saved)
    assert names(tmp_path) == ["round-00000041", "round-00000042"]
    loaded = store.newest()
    assert loaded
    assert loaded.pending


def delete(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [delete, truncate, empty, flip])
@pytest.mark.parametrize("file", ["checkpoint.json", "state.safetensors", "local.safetensors"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: object, file: str
) -> None:
    store = StateStore(tmp_path, RUN)
    store.save(checkpoint(41))
    path = store.save(checkpoint(42))
    assert callable(damage)
    damage(path / file)
    loaded = store.newest()
    assert loaded
    assert bits(loaded) == bits(checkpoint(41))
    [record] = caplog.records
    assert f"checkpoint {path} is damaged and not used: {file}" in record.getMessage()
    assert names(tmp_path) == ["damaged-round-00000042", "round-00000041"]


def test_local_files_of_two_checkpoints_are_not_mixed(tmp_path: Path) -> None:
    store = StateStore(tmp_path, RUN)
    one, other = store.save(checkpoint(41)), store.save(checkpoint(42, pending=False))
    shutil.copy(one / "local.safetensors", other / "local.safetensors")
    loaded = store.newest()
    assert loaded
    assert loaded.state.round == 41


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    file=st.sampled_from(["state.safetensors", "local.safetensors"]),
    position=st.integers(0, 400),
    value=st.sampled_from(b'\x00\xff019"[') | st.integers(0, 255),
)
def test_no_damage_goes_unnoticed_or_crashes(tmp_path: Path, file: str, position: int, value: int) -> None:
    store = StateStore(tmp_path, RUN)
    saved = checkpoint(length=20)
    path = store.save(saved) / file
    data = bytearray(path.read_bytes())
    data[position % len(data)] = value
    path.write_bytes(data)
    loaded = store.newest()
    assert loaded is None or bits(loaded) == bits(saved)


def test_few_damaged_checkpoints_are_kept(tmp_path: Path) -> None:
    store = StateStore(tmp_path, RUN)
    for number in (40, 41, 42, 43):
        (store.save(checkpoint(number)) / "checkpoint.json").write_text("{")
        assert store.newest() is None
    assert names(tmp_path) == ["damaged-round-00000042", "damaged-round-00000043"]


def test_all_damaged_is_nothing_loaded(tmp_path: Path) -> None:
    store = StateStore(tmp_path, RUN)
    for _ in range(2):
        (store.save(checkpoint()) / "checkpoint.json").write_text("{")
        assert store.newest() is None
    assert names(tmp_path) == ["damaged-round-00000042"]


def test_a_checkpoint_of_another_run_is_an_error(tmp_path: Path) -> None:
    StateStore(tmp_path, RUN).save(checkpoint())
    with pytest.raises(PierError, match="belongs to another run") as error:
        StateStore(tmp_path, bytes(32)).newest()
    assert "--data" in error.value.remedy
    assert names(tmp_path) == ["round-00000042"]


def test_a_checkpoint_of_a_newer_pier_is_an_error(tmp_path: Path) -> None:
    record = StateStore(tmp_path, RUN).save(checkpoint()) / "checkpoint.json"
    fields = json.loads(record.read_text())
    del fields["checksum"]
    record.write_bytes(seal({**fields, "format": 2}))
    with pytest.raises(PierError, match="format 2, this Pier reads 1"):
        StateStore(tmp_path, RUN).newest()


def test_everything_is_on_the_disk_before_it_gets_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = list[str]()
    rename = Path.rename

    def watch(path: Path, target: Path) -> Path:
        synced.append(f"{path.name} -> {target.name}")
        return rename(path, target)

    monkeypatch.setattr("pier_node.rounds.state_store.sync", lambda path: synced.append(path.name))
    monkeypatch.setattr(Path, "rename", watch)
    path = StateStore(tmp_path, RUN).save(checkpoint())
    temporary = f"{path.name}.tmp"
    assert set(synced[:3]) == set(names(path))
    assert synced[3:] == [temporary, f"{temporary} -> {path.name}", tmp_path.name]


SAVE = """
import resource, sys
from pathlib import Path
from pier_node.rounds.state_store import StateStore
from test_state_store import RUN, checkpoint
from pier_node.base.errors import PierError
store = StateStore(Path(sys.argv[1]), RUN)
store.save(checkpoint(41, length=10))
"""

FILL_THE_DISK = """
large = checkpoint(42, length=100_000)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    store.save(large)
except PierError as error:
    print(error.problem)
"""

DIE = """
import os, signal
from pier_node.rounds import state_store as saving
count = 0
def die_at(*_):
    global count
    count += 1
    if count == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
plain_sync, plain_rename = saving.sync, Path.rename
saving.sync = lambda path: (die_at(), plain_sync(path))
Path.rename = lambda path, target: (die_at(), plain_rename(path, target))
store.save(checkpoint(42, length=10))
store.save(checkpoint(42, length=20))
"""


def in_process(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A process that runs `script` with this file importable."""
    command = [sys.executable, "-c", SAVE + script, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)


def test_a_disk_that_is_full_costs_nothing_but_the_new_checkpoint(tmp_path: Path) -> None:
    done = in_process(FILL_THE_DISK, tmp_path)
    assert done.stdout.startswith(f"cannot save a checkpoint in {tmp_path}: ")
    assert "File too large" in done.stdout
    assert names(tmp_path) == ["round-00000041"]
    loaded = StateStore(tmp_path, RUN).newest()
    assert loaded
    assert bits(loaded) == bits(checkpoint(41, length=10))


@pytest.mark.sample(5)
@pytest.mark.parametrize("point", range(1, 14))
def test_wherever_it_is_killed_a_whole_checkpoint_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, point: int
) -> None:
    """Two saves of one round have 13 steps: a file, a folder or a name goes to the disk in each."""
    died = in_process(DIE, tmp_path, point)
    assert died.returncode == -9, died.stderr
    store = StateStore(tmp_path, RUN)
    loaded = store.newest()
    assert loaded
    assert bits(loaded) in [bits(checkpoint(41, length=10)), *(bits(checkpoint(42, length=n)) for n in (10, 20))]
    assert loaded.state.round == (41 if point <= 5 else 42)
    assert caplog.text == "", "a save that was cut off is no damage"
    store.save(checkpoint(43))
    kept = {41: "round-00000041", 42: "round-00000042.old" if point == 12 else "round-00000042"}
    assert names(tmp_path) == [kept[loaded.state.round], "round-00000043"]


def test_a_round_whose_saving_was_cut_off_can_be_saved_again(tmp_path: Path) -> None:
    in_process(DIE, tmp_path, 13)
    assert names(tmp_path) == ["round-00000041", "round-00000042", "round-00000042.old"]
    StateStore(tmp_path, RUN).save(checkpoint(42))
    assert names(tmp_path) == ["round-00000041", "round-00000042"]


# --- what keeps no checkpoints: committed states, and the versions of a pipeline's stages --------


def state(round: int, tag: float = 2.0) -> OuterState:
    return outer_state(["a1", "b2"], round=round, anchor=[round, tag], a1=7)


@pytest.fixture
def kept(tmp_path: Path) -> StateStore:
    return StateStore(tmp_path / "states", RUN)


def test_nothing_kept_is_nothing_found(kept: StateStore) -> None:
    assert kept.after(0) is None
    assert kept.rounds() == []


def test_the_newest_state_comes_back_whole(kept: StateStore) -> None:
    for round in (1, 2, 3):
        kept.keep(state(round))
    found = kept.after(2)
    assert found is not None
    assert (found.round, found.digest, found.ledger) == (3, state(3).digest, {"a1": 7})
    assert kept.after(3) is None


def test_two_states_are_kept(kept: StateStore, tmp_path: Path) -> None:
    for round in range(1, 12):
        kept.keep(state(round))
    assert names(tmp_path / "states") == ["round-00000010", "round-00000011"]


def test_a_state_that_counts_is_kept_however_many_come_after_it(kept: StateStore) -> None:
    for round in range(1, 6):
        kept.keep(state(round), beside=(2,))
    assert kept.rounds() == [5, 4, 2]


def test_a_state_that_was_just_kept_is_there_whatever_its_number(kept: StateStore) -> None:
    for round in (5, 6, 3):
        kept.keep(state(round))
    assert kept.of(3)
    assert kept.rounds() == [6, 3]


def test_of_two_states_of_one_round_the_last_is_kept(kept: StateStore) -> None:
    kept.keep(state(4))
    kept.keep(state(4, tag=9.0))
    found = kept.of(4)
    assert found
    assert found.digest == state(4, tag=9.0).digest


def test_what_earlier_versions_left_unfinished_is_removed(kept: StateStore, tmp_path: Path) -> None:
    (tmp_path / "states" / "unfinished").mkdir(parents=True)
    kept.keep(state(4))
    assert names(tmp_path / "states") == ["round-00000004"]


@pytest.mark.parametrize("file", ["checkpoint.json", "state.safetensors"])
def test_a_damaged_state_is_passed_over(kept: StateStore, tmp_path: Path, file: str) -> None:
    kept.keep(state(4))
    kept.keep(state(5))
    truncate(tmp_path / "states" / "round-00000005" / file)
    found = kept.after(0)
    assert found is not None
    assert found.round == 4


@pytest.mark.parametrize("file", ["checkpoint.json", "state.safetensors"])
def test_a_damaged_state_is_written_again(kept: StateStore, tmp_path: Path, file: str) -> None:
    kept.keep(state(4))
    truncate(tmp_path / "states" / "round-00000004" / file)
    assert kept.of(4) is None
    again = StateStore(tmp_path / "states", RUN)  # as at the next start: what a process wrote itself it does not read
    again.keep(state(4))
    found = again.of(4)
    assert found
    assert found.digest == state(4).digest


def test_states_of_another_run_are_not_used(kept: StateStore, tmp_path: Path) -> None:
    kept.keep(state(4))
    assert StateStore(tmp_path / "states", bytes(31) + b"1").after(0) is None


def test_a_disk_that_fails_is_told(kept: StateStore, tmp_path: Path) -> None:
    kept.keep(state(4))
    shutil.rmtree(tmp_path / "states")
    (tmp_path / "states").touch()
    with pytest.raises(PierError, match="cannot keep the state of round 5"):
        kept.keep(state(5))


def test_a_state_can_be_dropped_also_twice(kept: StateStore) -> None:
    kept.keep(state(4))
    kept.keep(state(5))
    assert kept.rounds() == [5, 4]
    for _ in range(2):
        kept.drop(5)
        assert kept.rounds() == [4]
    assert kept.of(5) is None


def test_a_checkpoint_shares_the_file_of_its_state(kept: StateStore, tmp_path: Path) -> None:
    kept.keep(state(4))
    kept.keep(state(5))
    store = StateStore(tmp_path / "checkpoints", RUN, shares=kept)
    inodes = {(store.save(Checkpoint(it)) / "state.safetensors").stat().st_ino for it in (state(4), state(5, tag=9.0))}
    files = {round: tmp_path / "states" / f"round-0000000{round}" / "state.safetensors" for round in (4, 5)}
    assert files[4].stat().st_ino in inodes
    assert files[5].stat().st_ino not in inodes, "that is another state of that round"
    for round in (6, 7):
        kept.keep(state(round))
    assert not files[4].exists()
    loaded = store.newest()
    assert loaded
    assert loaded.state.digest == state(5, tag=9.0).digest


def test_moments_are_those_that_are_not_in_the_state() -> None:
    assert checkpoint(sync=True).moments is None
    moments = checkpoint().moments
    assert moments
    assert (moments[0].tolist(), moments[2]) == (vector(1000, 10).array.tolist(), 2100)


# --- reading beside the daemon that saves: pier-node export, evaluate, generate, status ----------


def test_the_newest_whole_state_is_read_and_nothing_is_changed(tmp_path: Path) -> None:
    store, reader = StateStore(tmp_path, RUN), StateStore(tmp_path, RUN)
    assert reader.peek() is None
    assert reader.newest_state() is None
    store.save(checkpoint(7))
    store.save(checkpoint(8))
    peeked = reader.peek()
    assert peeked
    assert (peeked[0].name, peeked[1]["round"]) == ("round-00000008", 8)
    (tmp_path / "round-00000008" / "state.safetensors").write_bytes(b"torn")
    found = reader.newest_state()
    assert found
    assert found.digest == checkpoint(7).state.digest
    assert names(tmp_path) == ["round-00000007", "round-00000008"]


def test_another_runs_checkpoint_is_refused(tmp_path: Path) -> None:
    StateStore(tmp_path, RUN).save(checkpoint(7))
    for read in (StateStore(tmp_path, bytes(32)).peek, StateStore(tmp_path, bytes(32)).newest_state):
        with pytest.raises(PierError, match="another run"):
            read()


def test_the_folder_is_listed_again_when_the_daemon_overtook_the_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, read = StateStore(tmp_path, RUN, keep=1), read_sealed
    store.save(checkpoint(7))

    def overtaken(path: Path) -> dict[str, object]:
        if path.parent.name == "round-00000007":
            store.save(checkpoint(8))
        return read(path)

    monkeypatch.setattr("pier_node.rounds.state_store.read_sealed", overtaken)
    found = StateStore(tmp_path, RUN).newest_state()
    assert found
    assert found.round == 8
