from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import get_args

import pytest
from wire.sites import ALICE, RUN

from pier_node.base.errors import PierError
from pier_node.wire.grpc.carrier import GrpcCarrier
from pier_node.wire.libp2p.carrier import HivemindCarrier
from pier_node.wire.transport import Transport, make_carrier


@pytest.mark.parametrize(
    ("transport", "kind"), [("grpc", GrpcCarrier), ("hivemind", HivemindCarrier)], ids=get_args(Transport)
)
async def test_each_has_its_carrier(transport: Transport, kind: type) -> None:
    carrier = make_carrier(transport, ALICE.node, RUN, None)
    assert type(carrier) is kind
    await carrier.stop()


def test_without_hivemind_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "hivemind" else found(name))
    with pytest.raises(PierError, match="hivemind, which is not installed") as error:
        make_carrier("hivemind", ALICE.node, RUN, None)
    assert error.value.remedy == "In the clone of Pier: scripts/install hivemind"


def test_the_choice_alone_imports_nothing_heavy() -> None:
    script = "import sys, pier_node.wire.transport; print({'grpc', 'hivemind', 'torch'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "set()\n"
