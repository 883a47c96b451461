"""The messages between the daemon and the program that trains: one JSON object per line, over a Unix socket.

Large data (weights, moments, gradients) is in shared memory; a message refers to it by path.

Metrics that do not fit the bounds never leave the program: they are left out, with a warning. The daemon relies on no
program to keep them: a message that does not is no message.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from pier_node.base.errors import PierError

log = logging.getLogger(__name__)

MOST = 64
"""Most names that a site has metrics of."""
WORDS = 200
"""Longest text in characters."""
SAMPLE = "sample"
"""The name of a text that the model has written. The run's coordinator gets it, for people to read."""
NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.: -]{0,63}(/[A-Za-z0-9_][A-Za-z0-9_.: -]{0,63}){0,3}$"
"""Parts with slashes between them, as trackers group them; MLflow and TensorBoard take no other characters."""

Value = Annotated[float, Field(allow_inf_nan=False)] | Annotated[str, Field(max_length=WORDS)]
Metrics = Annotated[dict[Annotated[str, Field(pattern=NAME)], Value], Field(max_length=MOST)]
"""Finite numbers and short texts, by name."""

_METRICS: TypeAdapter[dict[str, float | str]] = TypeAdapter(Metrics, config=ConfigDict(strict=True))
_FITS = (
    f"it takes finite numbers and texts of at most {WORDS} characters, with names of letters, digits, '_', '.', ':', "
    "'-' and spaces, of at most four parts with '/' between them"
)


def newest(before: Mapping[str, float | str], later: Mapping[str, float | str]) -> dict[str, float | str]:
    """The last value of each name; of more than MOST names those that were logged last."""
    kept = {name: value for name, value in before.items() if name not in later}
    return dict([*kept.items(), *later.items()][-MOST:])


class Waiting:
    """What a program has logged and the daemon has not heard yet.

    Attributes:
        step: inner steps of the run that were done when the last of it was logged.
    """

    def __init__(self) -> None:
        self.step = 0
        self._metrics: dict[str, float | str] = {}
        self._warned: set[str] = set()

    def add(self, metrics: Mapping[str, Any], step: int) -> None:
        """Add what fits; warn once of each name that does not, or whose value does not."""
        fitting: dict[str, float | str] = {}
        for name, value in metrics.items():
            try:
                fitting |= _METRICS.validate_python({name: value if isinstance(value, str) else float(value)})
            except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several values
                self._warn(repr(name)[:WORDS], repr(value)[:WORDS])
        self._metrics, self.step = newest(self._metrics, fitting), step

    def take(self) -> dict[str, float | str]:
        """All of it; afterwards nothing waits."""
        taken, self._metrics = self._metrics, {}
        return taken

    def _warn(self, name: str, value: str) -> None:
        if name not in self._warned and len(self._warned) < MOST:
            self._warned.add(name)
            log.warning("site.log leaves out %s: %s: %s", name, value, _FITS)


VERSION = 9
"""Of these messages. A program that speaks another version is refused."""
LINE_LIMIT = 1 << 20
"""Maximum length of a line in bytes, including its end."""

_STRICT = ConfigDict(extra="forbid", strict=True)


Ability = Literal["gradient", "moments", "evaluate", "rate"]
"""What a program may be able to do besides its inner steps: see docs/engine.md. Pier's own trainer can do all of it."""


@dataclass(frozen=True, config=_STRICT)
class Attach:
    """Program: it is here, with this model."""

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
    can: list[Ability]


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
    publish: bool
    """Whether the program is to publish the weights that it has, before it is ready. Later the outbox may hold what a
    predecessor has learned, and no round has yet."""
    adam_m: str = ""
    adam_v: str = ""
    """The shared vectors of AdamW's moments, for a program that announces "moments"."""


@dataclass(frozen=True, config=_STRICT)
class Ready:
    """Program: it is ready for requests, and has published its weights if it had to; after `Over`, it has loaded the
    last ones."""

    device: str = ""
    """What it trains on, in words; "": it does not tell."""
    full_speed: float = 0.0
    """Tokens per second of the model's FLOPs at the devices' peak; 0: not known."""
    fallback: str = ""
    """Why what it trains on is probably not what the site's owner wants; "" if it is."""


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
    sequences: int = 0
    """Sequences that the site trains on per step; a program that makes its own batches need not look at it."""
    publish: Literal["weights", "gradient"] = "weights"
    """"gradient", for a program that announces it: compute one step's, publish it, and leave the weights alone."""
    moments: int | None = None
    """For a program that announces "moments": load AdamW's first, which are that many steps old; None: its own."""


@dataclass(frozen=True, config=_STRICT)
class Enough:
    """Daemon: end the inner steps of this `Train` after the one under way, and publish what they have come to."""

    job: int


@dataclass(frozen=True, config=_STRICT)
class Evaluate:
    """Daemon, to a program that announces "evaluate": compute the validation loss of the weights in a vector.

    Inner steps are unaffected: each `Train` names the weights that it begins with.
    """

    id: int
    weights: str


@dataclass(frozen=True, config=_STRICT)
class Rate:
    """Daemon, to a program that announces "rate": compute the loss of each row of a file with a vector's weights.

    The file is .npy, [rows, context + 1] token ids.
    """

    id: int
    weights: str
    rows: str


@dataclass(frozen=True, config=_STRICT)
class Over:
    """Daemon: there is nothing more to train. `load`: the model of the finished run; "": this site leaves before."""

    load: str


@dataclass(frozen=True, config=_STRICT)
class Tokenizing:
    """Program: it is tokenizing the site's text; bytes of text read so far, and of the files, 0: unknown."""

    read: int
    size: int


@dataclass(frozen=True, config=_STRICT)
class Opened:
    """Program: it has its data, with that many tokens to train on and for validation."""

    train: int
    validation: int


@dataclass(frozen=True, config=_STRICT)
class Progress:
    """Program: step `step` is done.

    `loss` and `gradient_norm` are the site's at that step, the norm before clipping; NaN: the program does not tell.
    Tokens and seconds count from `Train`.
    """

    step: int
    loss: float
    tokens: int
    seconds: float
    gradient_norm: float = math.nan


@dataclass(frozen=True, config=_STRICT)
class Logged:
    """Program: metrics of its own, after `step` inner steps of the run."""

    step: int
    metrics: Metrics


@dataclass(frozen=True, config=_STRICT)
class Publishing:
    """Program: until `Done`, the shared vectors that it publishes are torn.

    One that announces "moments" waits for `Publish` before it writes them.
    """

    job: int


@dataclass(frozen=True, config=_STRICT)
class Publish:
    """Daemon, to a program that announces "moments" and is publishing weights: nothing reads the moments now."""

    moments: bool = True
    """Whether to publish the moments, too: a checkpoint will be made of them."""


@dataclass(frozen=True, config=_STRICT)
class Done:
    """Program: the inner steps are finished, and their result is published."""

    job: int
    steps: int
    """How many of them: all, unless the daemon said `Enough`."""
    tokens: int
    adam_step: int
    """Number of AdamW steps behind the moments published last; 0 if it keeps its optimizer to itself."""
    seconds: float
    peak_bytes: int
    """Peak device memory of rank 0 in bytes; 0 on a CPU, or if the program does not tell."""
    diverged: bool = False
    """Most losses were not finite. The daemon sees it in the weights too, but maybe later. A program that announces
    "moments" does not say so: the daemon makes them zeros when it has seen the weights."""


@dataclass(frozen=True, config=_STRICT)
class Evaluated:
    """Program: the validation loss in nats per token."""

    id: int
    loss: float


@dataclass(frozen=True, config=_STRICT)
class Rated:
    """Program: the mean loss of each row in nats per token."""

    id: int
    losses: list[float]


@dataclass(frozen=True, config=_STRICT)
class Left:
    """Program: it ends by itself, before the run is over."""

    step: int
    """Index in the whole run of the inner step that would have been next."""


@dataclass(frozen=True, config=_STRICT)
class Failed:
    """Either: an error that a restart cannot fix, with the texts of PierError."""

    problem: str
    remedy: str


Message = (
    Attach
    | Attached
    | Ready
    | Train
    | Enough
    | Evaluate
    | Rate
    | Over
    | Tokenizing
    | Opened
    | Progress
    | Logged
    | Publishing
    | Publish
    | Done
    | Evaluated
    | Rated
    | Left
    | Failed
)

_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}


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
