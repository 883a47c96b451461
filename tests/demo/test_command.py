from __future__ import annotations

import pytest

from pier_node.base.errors import PierError
from pier_node.demo.sites import output, started


async def test_what_a_command_prints() -> None:
    assert "pier-node" in await output("pier-node", "--version")


async def test_what_goes_wrong_is_told_in_the_commands_own_words() -> None:
    with pytest.raises(PierError, match=r"pier-coordinator invite: .*/nowhere"):
        await output("pier-coordinator", "invite", "--data", "/nowhere")


async def test_it_ends_with_whoever_waits_for_it() -> None:
    with pytest.raises(ZeroDivisionError):
        async with started("pier-node", "--version") as running:
            raise ZeroDivisionError
    assert running.returncode is not None
