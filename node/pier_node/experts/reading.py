"""Reads the text of a job in a separate process: `python -m pier_node.experts.reading JOB CONTEXT FOLDER`.

Reading may take minutes. Meanwhile the site's daemon stays responsive, and the process ends with the daemon.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pier_node.base.errors import PierError
from pier_node.base.processes import answer, die_with_parent
from pier_node.experts.domains import HeldOut, read_held_out, rows_of
from pier_node.experts.job import ExpertJob

ROWS = "dev.npy"
FEWEST, MOST = 2, 256
"""Minimum number of rows for a standard error, and maximum number of rows used, sampled from the whole dev split."""


@dataclass(frozen=True)
class Text:
    """The text that was read.

    Attributes:
        tokens: number of tokens to train on.
        rows: file of the rows that evaluate the expert, [rows, context + 1].
    """

    tokens: int
    rows: Path


async def read(job: ExpertJob, context: int, folder: Path) -> Text:
    """Read the text in another process, which ends when this is cancelled.

    Raises:
        PierError: the text cannot be read, is not the one of the plan, or is too short.
    """
    words = job.model_dump_json(), str(context), str(folder)
    told = await answer(__name__, *words, start_new_session=True)  # Ctrl+C in the daemon's terminal must not reach it
    if told.code:
        said = told.errors.strip().splitlines()[-1:]
        raise PierError(f"domain {job.domain.name} cannot be read: {' '.join(said) or f'exit {told.code}'}")
    found = json.loads(told.output)
    if "problem" in found:
        raise PierError(found["problem"], found["remedy"])
    return Text(found["tokens"], folder / ROWS)


def checked(job: ExpertJob, context: int, folder: Path) -> Text:
    """Read the text in this process; see `read`."""
    text = read_held_out(job.domain)
    if text.digest != job.domain_hash:
        raise PierError(
            f"domain {job.domain.name}: the text here is not the one that was planned with",
            "Give this site the same files; of a built-in domain, the same Python version.",
        )
    tokens = job.steps * job.batch_size * context
    if tokens > job.max_epochs * text.tokens + job.batch_size * context:  # steps are whole
        raise PierError(
            f"domain {job.domain.name}: {job.steps} steps are {tokens / text.tokens:.1f} epochs; "
            f"allowed: {job.max_epochs:g}",
            "Plan fewer steps, or raise experts.max_epochs.",
        )
    rows = judging(text, context)
    if len(rows) < FEWEST:
        raise PierError(
            f"domain {job.domain.name}: {len(text.texts['dev'])} bytes of held-out text do not tell a good expert",
            f"Give it more text: two rows of {context} bytes at least, of a tenth of it in three parts.",
        )
    np.save(folder / ROWS, rows)
    return Text(text.tokens, folder / ROWS)


def judging(text: HeldOut, context: int) -> npt.NDArray[np.uint8]:
    """The rows of a domain on which its expert is evaluated, [rows, context + 1]."""
    rows = rows_of(text.texts["dev"], context)
    return np.asarray(rows[np.linspace(0, len(rows) - 1, min(len(rows), MOST)).astype(int)])


def main() -> None:
    """Print the result for `read`."""
    die_with_parent()
    job, context, folder = sys.argv[1:]
    try:
        found = checked(ExpertJob.model_validate_json(job), int(context), Path(folder))
    except PierError as error:
        print(json.dumps({"problem": error.problem, "remedy": error.remedy}))
    else:
        print(json.dumps({"tokens": found.tokens}))


if __name__ == "__main__":
    main()
