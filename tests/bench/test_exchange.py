from __future__ import annotations

import numpy as np
import pytest
from rounds.exchanges import Exchange, vectors
from simulation.virtual_time import run

from bench.exchange import exchanged
from pier_node.outer.codec import CODECS
from pier_node.outer.codec.interface import Rounded
from pier_node.outer.mean import Update, Values


@pytest.mark.parametrize("name", CODECS)
def test_it_is_what_the_members_of_a_round_compute(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same mean and the same errors, where each site owns one chunk."""
    monkeypatch.setattr("bench.exchange.CHUNK", 1700)
    parts, tokens = vectors("abc", 5100), {"a": 1, "b": 2, "c": 5}

    async def main() -> Exchange:
        exchange = Exchange(parts, tokens, chunk=1700, codec=name)
        await exchange.run()
        return exchange

    real, lossy = run(main()), CODECS[name].lossy
    errors = {node: np.zeros(5100, np.float32) for node in parts}
    mean = exchanged(
        [Update(parts[node], tokens[node], errors[node] if lossy else None) for node in parts], CODECS[name]
    )
    for node in parts:
        np.testing.assert_array_equal(real.means[node], mean)
        if lossy:
            np.testing.assert_array_equal(real.errors[node], errors[node])


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "topk", "topk2"])
def test_error_feedback_brings_all_of_it_in_the_end(name: str, rounded: bool) -> None:
    """The sum of what arrives stays within a bounded distance of the sum of what was sent."""
    parts = list(vectors("ab", 4096).values())
    residuals: list[Values] = [np.zeros(4096, np.float32) for _ in parts]
    arrived, distances = np.zeros(4096), list[float]()
    for number in range(1, 401):
        sent = [
            Update(part, 1, Rounded(np.zeros(4096, np.uint16)) if rounded else np.zeros(4096, np.float32), residual)
            for part, residual in zip(parts, residuals, strict=True)
        ]
        arrived += exchanged(sent, CODECS[name])
        residuals = [update.error for update in sent if update.error is not None]
        wanted = number * (parts[0] + parts[1]) / 2
        distances.append(float(np.linalg.norm(arrived - wanted) / np.linalg.norm(wanted)))
    assert distances[-1] < 0.25 * max(distances[0], 1e-4)
