from __future__ import annotations

import logging

import pytest

from pier_node.site.report import named, naming

ALPHA, OTHER = "0123456789abcdef", "fedcba9876543210"


def called(node: str) -> str:
    return f"alpha ({node})" if node == ALPHA else node


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"given up: {ALPHA}: silent", f"given up: alpha ({ALPHA}): silent"),
        (f"absent: {ALPHA}, {OTHER}", f"absent: alpha ({ALPHA}), {OTHER}"),
        (f"alpha ({ALPHA}) is back", f"alpha ({ALPHA}) is back"),
        (f"digest {ALPHA}{OTHER}, round 7", f"digest {ALPHA}{OTHER}, round 7"),
    ],
)
def test_a_node_id_gets_its_name_once(text: str, shown: str) -> None:
    assert named(text, called) == shown
    assert named(shown, called) == shown


def test_every_handler_sees_the_name(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("pier_node.test")
    names = naming(called)
    caplog.handler.addFilter(names)
    try:
        log.warning("round %d: %s is at 100%% of its line: %s", 7, ALPHA, "5 % lost")
    finally:
        caplog.handler.removeFilter(names)
    assert caplog.messages == [f"round 7: alpha ({ALPHA}) is at 100% of its line: 5 % lost"]
