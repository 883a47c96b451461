from __future__ import annotations

import logging
import math

import pytest

from pier_node.engine.device import Device
from pier_node.engine.messages import Ready


def test_what_a_program_says_of_its_devices_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    device = Device()
    with caplog.at_level(logging.INFO):
        device.told(Ready("1 x NVIDIA L4 (22 GiB each), bf16", full_speed=2000.0))
    assert "training on 1 x NVIDIA L4" in caplog.text
    assert device.mfu(500.0) == 0.25


def test_a_program_may_keep_it_to_itself(caplog: pytest.LogCaptureFixture) -> None:
    device = Device()
    with caplog.at_level(logging.INFO):
        device.told(Ready())
    assert caplog.text == ""
    assert math.isnan(device.mfu(500.0))


def test_training_on_a_cpu_beside_a_gpu_is_shouted(caplog: pytest.LogCaptureFixture) -> None:
    Device().told(Ready("1 x CPU (2 threads each), fp32", fallback="PyTorch sees no GPU"))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "TRAINING ON THE CPU: PyTorch sees no GPU" in record.message
