"""The list of revoked sites: who may sign it, which one counts, and what is left of it after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from pier_node.identity.certificates import authority, authority_key
from pier_node.identity.node import Token
from pier_node.rounds.revocations import FILE, Revoked, signed
from pier_proto.v1.peer_pb2 import Revocations

RUN = bytes(range(32))
TOKEN = Token(bytes(32), RUN[:16])
ALICE, BOB, CAROL = "a" * 16, "b" * 16, "c" * 16


def told(version: int, *nodes: str) -> Revocations:
    return signed(authority_key(TOKEN), RUN, version, nodes)


class Here:
    """A site, and whom it has nothing to do with."""

    def __init__(self, folder: Path) -> None:
        self.barred: list[str] = []
        self.revoked = Revoked(folder, authority(TOKEN), RUN, lambda nodes: self.barred.extend(nodes))


def test_a_list_is_applied_at_once_and_at_the_next_start(tmp_path: Path) -> None:
    here = Here(tmp_path)
    here.revoked.take(told(1, BOB, ALICE))
    assert (here.barred, here.revoked.version) == ([ALICE, BOB], 1)
    again = Here(tmp_path)
    again.revoked.restore()
    assert (again.barred, again.revoked.newest) == (here.barred, here.revoked.newest)


def test_an_older_list_never_replaces_a_newer_one(tmp_path: Path) -> None:
    here = Here(tmp_path)
    for list in (told(5, ALICE, BOB), told(4, ALICE), told(5, CAROL), Revocations()):
        here.revoked.take(list)
    assert (here.barred, here.revoked.version) == ([ALICE, BOB], 5)
    again = Here(tmp_path)
    again.revoked.restore()
    assert again.revoked.version == 5


FORGED = {
    "by a member": signed(ec.generate_private_key(ec.SECP256R1()), RUN, 9, [BOB]),
    "for another run": signed(authority_key(TOKEN), bytes(32), 9, [BOB]),
    "of another version": Revocations(version=10, nodes=[BOB], signature=told(9, BOB).signature),
    "with another node": Revocations(version=9, nodes=[CAROL], signature=told(9, BOB).signature),
    "not at all": Revocations(version=9, nodes=[BOB]),
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_only_the_authority_revokes(tmp_path: Path, forged: Revocations, caplog: pytest.LogCaptureFixture) -> None:
    here = Here(tmp_path)
    here.revoked.take(told(1, ALICE))
    for _ in range(3):
        here.revoked.take(forged)
    assert (here.barred, here.revoked.version) == ([ALICE], 1)
    assert caplog.messages == ["ignored a list of revoked sites that the run's authority did not sign"]


def test_a_damaged_list_is_said_and_comes_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Here(tmp_path).revoked.take(told(1, ALICE))
    (tmp_path / FILE).write_bytes(b"{")
    here = Here(tmp_path)
    here.revoked.restore()
    assert "is damaged; the peers or the coordinator will tell who was revoked" in caplog.text
    here.revoked.take(told(1, ALICE))
    assert here.barred == [ALICE]


def test_a_full_disk_does_not_let_a_revoked_site_in(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    here = Here(tmp_path / "gone")
    here.revoked.take(told(1, ALICE))
    assert here.barred == [ALICE]
    assert "after a restart this site may not know who was revoked" in caplog.text
