"""Windows of tokens for training and validation.

The windows of a step are a pure function of (seed, node, step): Philox (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC 2011), keyed by seed and node, counts from the step's number. A resumed run needs no data state,
and a worker draws only its own rows.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from pier_node.base.errors import PierError
from pier_node.trainer.data.corpus import Corpus
from pier_node.trainer.data.tokens import Tokens

Batch = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Inputs and targets, [sequences, context] each; targets are the inputs one token later."""


def share(sequences: int, worker: int, workers: int) -> tuple[int, int]:
    """The rows (first, count) of worker 0..workers-1 in a batch.

    Sizes differ by at most one, and together they are all.
    """
    first, end = (sequences * index // workers for index in (worker, worker + 1))
    return first, end - first


class Windows:
    """Windows of `context` tokens of a corpus: random with replacement for training by `node`, fixed for validation.

    Raises:
        PierError: the corpus is too small for one window.
    """

    def __init__(self, corpus: Corpus, context: int, seed: int, node: str) -> None:
        self._corpus, self._context = corpus, context
        self._train_starts = len(corpus.train) - context
        self._validation_starts = len(corpus.validation) - context
        self._key = int.from_bytes(hashlib.blake2b(f"{seed} {node}".encode(), digest_size=16).digest(), "big")
        needs = f"one window of model.context = {context} needs {context + 1}"
        if self._train_starts < 1:
            problem = f"this site's part of the training data has {len(corpus.train)} tokens; {needs}"
            raise PierError(problem, "Add text, deal it to fewer sites (run.sites), or lower model.context.")
        if self._validation_starts < 1:
            problem = f"the validation part of the data has {len(corpus.validation)} tokens; {needs}"
            raise PierError(problem, "Add text, raise data.validation, or lower model.context.")

    def batch(self, step: int, sequences: int) -> Batch:
        """All windows of a step."""
        return self.rows(step, 0, sequences)

    def rows(self, step: int, first: int, count: int) -> Batch:
        """Rows first..first+count-1 of a step's batch, whatever its size: see `share`."""
        # random_raw, because NumPy guarantees the bit stream of Philox, but not what `integers` makes of it.
        stream = np.random.Philox(key=self._key, counter=[0, 0, 0, step])
        draws = np.asarray(stream.random_raw(first + count))[first:]
        return self._cut(self._corpus.train, draws % np.uint64(self._train_starts))

    def validation(
        self, batches: int, sequences: int, at_once: int = 0, worker: int = 0, workers: int = 1
    ) -> list[Batch]:
        """Windows spread evenly over the validation part, always the same and at every site.

        Args:
            at_once: maximum sequences in a returned batch; 0: `sequences`.
            worker, workers: only this worker's share of the `batches * sequences` windows.
        """
        count, size = batches * sequences, at_once or sequences
        starts = np.arange(count) * (self._validation_starts - 1) // max(count - 1, 1)
        first, own = share(count, worker, workers)
        parts = (starts[index : min(index + size, first + own)] for index in range(first, first + own, size))
        return [self._cut(self._corpus.validation, part) for part in parts]

    def _cut(self, tokens: Tokens, starts: npt.NDArray[np.integer]) -> Batch:
        offsets = np.arange(self._context + 1)
        windows = tokens[starts.astype(np.int64)[:, None] + offsets].astype(np.int64)
        return windows[:, :-1], windows[:, 1:]
