from __future__ import annotations

from pathlib import Path

import torch

from pier_node.demo.pace import measure
from pier_node.demo.plan import cores, write_run


def test_a_machine_has_a_pace(tmp_path: Path) -> None:
    config = write_run(tmp_path / "run.toml", sites=8, algorithm="pier", steps=1)
    tiny = config.model_copy(update={"model": config.model.model_copy(update={"layers": 1})})
    threads = torch.get_num_threads()
    try:
        pace = measure(tiny, seconds=0.0)
    finally:
        torch.set_num_threads(threads)
    assert pace.tokens_per_second > 0
    assert pace.abreast == (1 if torch.cuda.is_available() else cores())
