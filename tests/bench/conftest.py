"""What a bench that runs in this process does to it ends with its test."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def logging_again() -> Iterator[None]:
    """Some benches are silent about what sites would log."""
    yield
    logging.disable(logging.NOTSET)
