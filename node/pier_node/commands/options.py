"""Options that several commands of Pier share, and the common way to print errors."""

from __future__ import annotations

import errno
import functools
import getpass
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import click

from pier_node.base.address import with_port
from pier_node.base.errors import PierError
from pier_node.config.presets import BESIDE, DATA, PRESETS
from pier_node.identity.node import TOKEN_VARIABLE, Token
from pier_node.trainer.parallel import Checkpointing, Mode, Parallel


class Finite(click.FloatRange):
    """A number within bounds that is neither inf nor nan."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Convert it; fail with a message that says what is wrong."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


class Picture(click.Path):
    """A picture to draw, in a folder that exists: otherwise long work would come to nothing at its end.

    Args:
        suffixes: endings that its name may have; without any, .svg, .png and .pdf.
    """

    def __init__(self, *suffixes: str) -> None:
        super().__init__(path_type=Path, dir_okay=False, writable=True)
        self._suffixes = suffixes or (".svg", ".png", ".pdf")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Convert it; fail with a message that says what is wrong."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if path.suffix.lower() not in self._suffixes:
            self.fail(f"{path}: name a file that ends in {' or '.join(self._suffixes)}", param, ctx)
        if not path.parent.is_dir():
            self.fail(f"{path}: there is no folder {path.parent}", param, ctx)
        return path


FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)

FOLDER = click.option(
    "--data",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=DATA,
    show_default=True,
    help="Folder of this site, with its identity, checkpoints and logs.",
)
LOG_JSON = click.option("--log-json", is_flag=True, help="Print each line as a JSON object. [default: for people]")
QUIET = click.option("--quiet", is_flag=True, help="Print only warnings and errors. [default: print progress too]")
WATCH = click.option("--watch", is_flag=True, help="Refresh every second until Ctrl+C. [default: print once]")
ROWS = click.option("--rows", type=click.IntRange(0), default=0, help="Rows per domain and split. [default: all]")
TOP_K = click.option(
    "--top-k", type=click.IntRange(0), default=0, help="How many experts a mixture selects. [default: one, and two]"
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts. [default: print tables]")
RUN = click.option(
    "--run",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The run.toml of a run to found. [default: the run in --data, or the one of --peers; without --data also "
    "run.toml here]",
)
PEERS = click.option(
    "--peers",
    multiple=True,
    metavar="ADDRESS",
    callback=lambda _context, _option, texts: tuple(
        with_port(address) for text in texts for address in text.split(",") if address
    ),
    help="Address of a site in the run to join. Can be repeated, or separated by commas. "
    "[default: the sites stored in --data; port 7700]",
)


def from_model(explained: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option --from: a folder in Hugging Face's format, or the name of a model on the hub, which is downloaded."""
    return click.option("--from", "weights", metavar="MODEL", callback=_model_folder, help=explained)


def _model_folder(_context: click.Context, _option: click.Parameter, name: str | None) -> Path | None:
    if not name:
        return None
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    if name.count("/") != 1:
        raise click.BadParameter(f"{name}: there is no such folder; models on the hub have names like Qwen/Qwen3-0.6B")
    wanted = ["config.json", "tokenizer.json", *BESIDE, "*.safetensors", "model.safetensors.index.json"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted, ignore_patterns=["*/*", "consolidated*"]))
    except Exception as error:  # versions of the library use different clients, each with errors of its own
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise click.BadParameter(
            f"{name}: there is no such folder, and the hub does not give it: {why}. Download it "
            "where the hub can be reached (`hf download`), or `hf auth login` if it wants to know who asks."
        ) from error


LONGEST_TOKEN = 4096
_TOKEN = click.option(
    "--token",
    help="Token that the first site or the invite printed; - asks for it. Other users of this machine can see this "
    "option, but not the environment variable PIER_TOKEN. [default: PIER_TOKEN, or the token stored in --data, or ask]",
)
_TOKEN_FILE = click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to read the token from. [default: as for --token]",
)
_PARALLEL = (
    click.option(
        "--workers", type=click.IntRange(0), default=0, help="Number of training processes. [default: one per GPU]"
    ),
    click.option(
        "--parallel",
        "mode",
        type=click.Choice(get_args(Mode)),
        default="auto",
        help="What each worker has of the model. ddp: all; fsdp: a part of every tensor; hsdp: a part of one of two "
        "copies. [default: chosen by the number and memory of the GPUs]",
    ),
    click.option(
        "--tensor",
        type=click.IntRange(1),
        default=1,
        help="Number of workers that compute each matrix together. [default: each computes all of it]",
    ),
    click.option(
        "--checkpointing",
        type=click.Choice(get_args(Checkpointing)),
        default="none",
        help="Save GPU memory by computing again. selective: keep only products of matrices; full: keep only the input "
        "of each block. [default: keep all activations]",
    ),
)
LISTEN = click.option(
    "--listen",
    default="",
    metavar="HOST[:PORT]",
    help="Address to listen on. [default: as stored in --data, or 0.0.0.0:7700]",
)
ADVERTISE = click.option(
    "--advertise",
    metavar="HOST[:PORT]",
    help="Address where other sites reach this one. [default: as stored in --data, or detected and printed]",
)
TRANSPORT = click.option(
    "--transport",
    type=click.Choice(["grpc", "hivemind"]),
    help="How sites connect: grpc is direct, hivemind goes over libp2p. All sites must use the same. "
    "[default: as stored in --data, or grpc]",
)
INSECURE = click.option(
    "--insecure",
    is_flag=True,
    help="Use no TLS and no token: anyone who can reach the port can take part. [default: TLS and the run's token]",
)
MODEL = click.option(
    "--model",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Folder of an exported model. [default: the newest checkpoint in --data]",
)
DEVICE = click.option(
    "--device", default="", help="Device: cpu, cuda or cuda:N. [default: a GPU if there is one, else the CPU]"
)
PLOT = click.option(
    "--plot",
    type=Picture(),
    help="Write a plot to this file: .svg, .png or .pdf. [default: no plot]",
)
FORCE = click.option("--force", is_flag=True, help="Overwrite FILE if it exists. [default: refuse]")


def dataset(otherwise: str) -> str:
    """The help text of --dataset, with its default."""
    return f"This site's own text, used instead of data.path of run.toml. [default: {otherwise}]"


def preset(of_what: str) -> Callable[..., Any]:
    """The option for one of the named models."""
    return click.option(
        "--preset",
        type=click.Choice(list(PRESETS)),
        metavar="NAME",  # the list of names has no place to wrap
        default="llama-1m",
        show_default=True,
        help=f"{of_what} One of {', '.join(PRESETS)}.",
    )


def with_token(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for a run's token or an invite; the command gets the value as `token`."""

    @explained
    @functools.wraps(command)
    def run(*args: Any, token: str | None, token_file: Path | None, **options: Any) -> Any:
        given = _given(token, token_file)
        return command(*args, token=_asked() if given is None and _asks(**options) else given, **options)

    return _TOKEN(_TOKEN_FILE(run))


def with_parallel(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for a site's workers: the command gets `workers`, and how they share the model as `parallel`."""

    @functools.wraps(command)
    def run(*args: Any, mode: Any, tensor: int, checkpointing: Any, **options: Any) -> Any:
        return command(*args, parallel=Parallel(mode, tensor, checkpointing), **options)

    for option in reversed(_PARALLEL):
        run = option(run)
    return run


def _given(token: str | None, file: Path | None) -> str | None:
    """The given token. It must stay secret: all users of a machine can read argv."""
    kept = os.environ.pop(TOKEN_VARIABLE, None)  # processes started by this one do not need it
    if token is not None and file is not None:
        raise PierError("--token and --token-file exclude each other", "Give only one of them.")
    if token == "-":
        return _asked() if sys.stdin.isatty() else sys.stdin.readline(LONGEST_TOKEN)
    if file is None:
        return token or kept or None
    try:
        with file.open(errors="replace") as text:
            return text.read(LONGEST_TOKEN)
    except OSError as error:
        raise PierError(f"{file}: {error.strerror}", "Give a file that contains only the token.") from error


def _asks(
    peers: Sequence[str] = (),
    coordinator: str | None = None,
    insecure: bool = False,
    folder: Path | None = None,
    program_socket: Path | None = None,
    **_other: Any,
) -> bool:
    """Whether a site that joins a run has to be asked for its token, and somebody is there to answer."""
    if insecure or program_socket is not None or not (peers or coordinator) or not sys.stdin.isatty():
        return False
    from pier_node.site.coordinator.link import FILE

    return folder is None or not (Token.path(folder).exists() or (folder / FILE).exists())


def _asked() -> str:
    return getpass.getpass("Token (it is not shown): ")


def _print(error: PierError) -> None:
    click.secho(f"Error: {error.problem}", fg="red", err=True)
    if error.remedy:
        click.echo(error.remedy, err=True)


def explained(command: Callable[..., Any]) -> Callable[..., Any]:
    """Print a PierError for people and exit with 1; likewise if a file may not be read or written."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> Any:
        try:
            return command(*args, **options)
        except PierError as error:
            _print(error)
        except OSError as error:
            if error.errno not in FORBIDDEN or not error.filename:
                raise
            _print(
                PierError(
                    f"{error.filename}: {error.strerror}",
                    "Make room, run this as another user, or choose another path.",
                )
            )
        sys.exit(1)

    return run
