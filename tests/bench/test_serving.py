from __future__ import annotations

from pathlib import Path

from bench.serving import make, measured, without_cache


async def test_what_is_measured_is_an_ensemble_that_answers(tmp_path: Path) -> None:
    make(tmp_path, "llama-tiny", 2)
    for top_k in (0, 1):
        run = await measured(tmp_path, top_k, 5)
        assert run.prompt > 0
        assert run.together > 0
    assert without_cache(tmp_path) > 0
