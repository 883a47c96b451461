"""The messages between the daemon and its workers: one JSON object per line, over a Unix socket.

Large data (weights, moments, gradients) is in shared memory; a message refers to it by path.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Literal

from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from pier_node.base.errors import PierError
from pier_node.engine.metrics import Metrics

LINE_LIMIT = 1 << 20
"""Maximum length of a line in bytes, including its end."""

_STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, config=_STRICT)
class Setup:
    """From the daemon: the run, this site's part of it, and the shared vectors of `length` fp32 values."""

    config: str
    """RunConfig in its canonical form."""
    node: str
    slot: int
    slots: int
    data_path: str | None
    cache: str
    outbox: str
    adam_m: str
    adam_v: str
    length: int


@dataclass(frozen=True, config=_STRICT)
class Job:
    """From the daemon: do inner steps and publish weights and moments, or compute and publish one step's gradient."""

    id: int
    first_step: int
    """Index of the first step in the whole run."""
    steps: int
    sequences: int
    """Sequences that the site trains on per step."""
    payload: Literal["weights", "gradient"]
    load: str
    """The vector to load the weights from."""
    load_adam: bool
    """Whether to load AdamW's moments from adam_m and adam_v, which are `adam_step` steps old."""
    adam_step: int


@dataclass(frozen=True, config=_STRICT)
class Evaluate:
    """From the daemon: compute the validation loss of the weights in a vector.

    Jobs are unaffected: each loads its own.
    """

    id: int
    weights: str


@dataclass(frozen=True, config=_STRICT)
class Rate:
    """From the daemon: compute the loss of each row of a file (.npy, [rows, context + 1]) with a vector's weights."""

    id: int
    weights: str
    rows: str


@dataclass(frozen=True, config=_STRICT)
class Hello:
    """From a worker: it has connected. `attempt` counts the restarts of the group."""

    rank: int
    world: int
    attempt: int
    device: str


@dataclass(frozen=True, config=_STRICT)
class Tokenizing:
    """From a worker: it is tokenizing the site's text; bytes of text read so far, and bytes of the files."""

    read: int
    size: int


@dataclass(frozen=True, config=_STRICT)
class Progress:
    """From worker 0: step `step` is done.

    `loss` is the site's at that step; tokens and seconds count from the job's start.
    """

    step: int
    loss: float
    tokens: int
    seconds: float


@dataclass(frozen=True, config=_STRICT)
class Publishing:
    """From worker 0: until `Done`, the shared vectors that the job publishes are torn."""

    job: int


@dataclass(frozen=True, config=_STRICT)
class Done:
    """From worker 0: the job is finished and published."""

    job: int
    tokens: int
    loss: float
    """Mean over the job's steps; of a program that of the last step, or NaN if it tells none."""
    adam_step: int
    seconds: float
    peak_bytes: int
    """Peak device memory of worker 0 in bytes; 0 on a CPU."""
    diverged: bool = False
    """Most losses were not finite. Only a program says so: the daemon sees it in the weights too, but maybe later."""


@dataclass(frozen=True, config=_STRICT)
class Evaluated:
    """From worker 0: the validation loss in nats per token."""

    id: int
    loss: float


@dataclass(frozen=True, config=_STRICT)
class Rated:
    """From worker 0: the mean loss of each row in nats per token."""

    id: int
    losses: list[float]


@dataclass(frozen=True, config=_STRICT)
class Failed:
    """From a worker: an error that a restart cannot fix, with the texts of PierError."""

    problem: str
    remedy: str


@dataclass(frozen=True, config=_STRICT)
class Attach:
    """Program: a training program of the site's owner is here, with this model; see engine/program.py."""

    version: int
    tensors: list[str]
    """As [program] of run.toml lists them."""
    step_tokens: int
    """Tokens of an inner step, at most."""
    config: str
    """Tables of a run.toml, as JSON, for a run that this site is to found; "": none."""
    ranks: int
    """Processes that train the model together."""
    patience: float
    """Seconds that may pass between two steps, at least, before the program counts as hung."""


@dataclass(frozen=True, config=_STRICT)
class Attached:
    """Daemon: the site's place in the run, and the shared vector that takes the weights, as long as the model."""

    outbox: str
    table: str
    """Where each rank says who it is and how far: see engine/ranks.py."""
    slot: int
    slots: int
    total_steps: int
    folder: str
    """Where the program may keep what only it understands: its optimizer's state."""
    daemon: int
    """The daemon's process id: a program that it has started ends with it."""


@dataclass(frozen=True, config=_STRICT)
class Ready:
    """Program: its weights are in the outbox; or, after `Over`, it has loaded the last ones."""


@dataclass(frozen=True, config=_STRICT)
class Train:
    """Daemon: load these weights, do `steps` inner steps, and publish the weights."""

    id: int
    first_step: int
    """Index in the whole run of the first step."""
    steps: int
    load: str
    forget: bool
    """The optimizer begins without a state: training diverged."""
    round: int
    """The last round that was committed."""
    sites: int
    """Live sites of the run, this one included."""
    losses: dict[str, float]
    """The last training loss of other sites, by name."""


@dataclass(frozen=True, config=_STRICT)
class Logged:
    """Program: metrics of its own, after `step` inner steps of the run."""

    step: int
    metrics: Metrics


@dataclass(frozen=True, config=_STRICT)
class Over:
    """Daemon: there is nothing more to train. `load`: the model of the finished run; "": this site leaves before."""

    load: str


Message = (
    Attach
    | Attached
    | Ready
    | Train
    | Logged
    | Over
    | Setup
    | Job
    | Evaluate
    | Rate
    | Hello
    | Tokenizing
    | Progress
    | Publishing
    | Done
    | Evaluated
    | Rated
    | Failed
)

_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in (
        Attach,
        Attached,
        Ready,
        Train,
        Logged,
        Over,
        Setup,
        Job,
        Evaluate,
        Rate,
        Hello,
        Tokenizing,
        Progress,
        Publishing,
        Done,
        Evaluated,
        Rated,
        Failed,
    )
}


def encode(message: Message) -> bytes:
    """A message as one line. Raises PierError when it is longer than LINE_LIMIT."""
    line = json.dumps({"kind": type(message).__name__, **asdict(message)}).encode() + b"\n"
    if len(line) > LINE_LIMIT:
        raise PierError(f"a {type(message).__name__} of {len(line)} bytes is longer than a line may be, {LINE_LIMIT}")
    return line


def decode(line: bytes) -> Message:
    """The message in a line. Raises PierError when the line contains no message."""
    try:
        fields = json.loads(line)
        kind = _KINDS[fields.pop("kind")]
        return kind(**fields)
    except (ValueError, KeyError, TypeError, AttributeError, ValidationError) as error:
        raise PierError(f"a line between daemon and worker is no message: {line[:200]!r}: {error}") from error
