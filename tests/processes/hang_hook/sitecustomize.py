"""What test_pipeline.py changes in a site: its stage computes nothing while the file PIER_TEST_HANG is there.

Nor does it open its data while PIER_TEST_TOKENIZE is there.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if "PIER_TEST_HANG" in os.environ and any(word.endswith("pier-node") for word in sys.orig_argv):
    from pier_node.pipeline.stage import Stage

    HANG = Path(os.environ["PIER_TEST_HANG"])

    def hanging(task: Callable[..., Any]) -> Callable[..., Any]:
        """The task, which does not begin while the file is there."""

        def late(*args: Any) -> Any:
            while HANG.exists():
                time.sleep(0.05)
            return task(*args)

        return late

    for name in ("embed", "forward", "loss", "backward"):
        setattr(Stage, name, hanging(getattr(Stage, name)))

if "PIER_TEST_TOKENIZE" in os.environ and any(word.endswith("pier-node") for word in sys.orig_argv):
    from pier_node.site import pipeline

    TOKENIZE, real = Path(os.environ["PIER_TEST_TOKENIZE"]), getattr(pipeline, "open_corpus")  # noqa: B009

    def opened_late(*args: Any) -> Any:
        """The data, after a long time."""
        TOKENIZE.with_name("tokenizing").touch()
        while TOKENIZE.exists():
            time.sleep(0.05)
        return real(*args)

    setattr(pipeline, "open_corpus", opened_late)  # noqa: B010
