"""Experiment trackers: TensorBoard, MLflow and Weights & Biases are told how a site fares, if its owner says so.

[log] of FOLDER/site.toml, which is this site's alone and no part of the run, names them:

    [log]
    tensorboard = "/srv/logs"           # a folder
    mlflow = "http://mlflow.lan:5000"   # a tracking URI; the experiment is called like the run
    wandb = "my-project"                # a project; see `wandb login`, or WANDB_MODE=offline
    samples = false                     # nobody is shown what the model writes
    otlp = "http://localhost:4318/v1/traces"  # an OpenTelemetry collector: see base/tracing.py

Each tracker is fed through its own library, which must be installed, by a thread beside the daemon's. A tracker that
fails is left out, with a warning: it never holds up a round.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pier_node.base.toml import Section, read_toml, validated
from pier_node.rounds.progress import Progress

SITE_FILE = "site.toml"
WAITING = 100
"""Most points that wait for a slow tracker; further ones are dropped."""
CLOSE_SECONDS = 10.0

PREFIX = "program/"
"""Of the names of what a site's program has logged itself."""

Metrics = Mapping[str, float | str]
Log = Callable[[Metrics, int], None]
"""Takes metrics, and the inner step that they belong to."""
Close = Callable[[], None]

log = logging.getLogger(__name__)


class LogSection(Section):
    """[log]: what a site tells of itself, and to which trackers; docs/operations.md."""

    tensorboard: str = ""
    mlflow: str = ""
    wandb: str = ""
    samples: bool = True
    otlp: str = ""


class SiteFile(Section):
    """site.toml: what a site's owner decides for this site alone."""

    log: LogSection = LogSection()

    @classmethod
    def of(cls, folder: Path) -> Self:
        """The file in a site's folder; without one, the defaults. Raises PierError: it is wrong."""
        path = folder / SITE_FILE
        return validated(read_toml(path, "an editor"), cls, str(path)) if path.exists() else cls()


@dataclass(frozen=True)
class Who:
    """What trackers, and traces, call this site.

    Attributes:
        run: the run's name; `site`: the site's.
        key: the same in every start of the site in this run, and different elsewhere.
    """

    run: str
    site: str
    key: str

    @property
    def attributes(self) -> dict[str, str]:
        """The same in the words of OpenTelemetry."""
        about = {"service.name": "pier-node", "service.instance.id": self.key}
        return about | {"pier.run": self.run, "pier.site": self.site}


def _tensorboard(folder: str, who: Who) -> tuple[Log, Close]:
    from tensorboard.summary import Writer

    writer = Writer(str(Path(folder) / f"{who.run}-{who.site}"))

    def told(metrics: Metrics, step: int) -> None:
        for name, value in metrics.items():
            if not isinstance(value, str):  # its own writer has nothing for texts
                writer.add_scalar(name, value, step)
        writer.flush()

    return told, writer.close


def _mlflow(uri: str, who: Who) -> tuple[Log, Close]:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(who.run)
    identifier = experiment.experiment_id if experiment else client.create_experiment(who.run)
    before = client.search_runs([identifier], f"tags.pier = '{who.key}'")
    run = before[0] if before else client.create_run(identifier, run_name=who.site, tags={"pier": who.key})

    def told(metrics: Metrics, step: int) -> None:
        for name, value in metrics.items():
            if isinstance(value, str):
                client.set_tag(run.info.run_id, name, value)
            else:
                client.log_metric(run.info.run_id, name, value, step=step)

    return told, lambda: client.set_terminated(run.info.run_id)


def _wandb(project: str, who: Who) -> tuple[Log, Close]:
    import wandb

    run = wandb.init(project=project, group=who.run, name=who.site, id=who.key, resume="allow")
    newest = 0

    def told(metrics: Metrics, step: int) -> None:
        nonlocal newest  # it drops what is of an earlier step; with overlap a round's point comes after the next steps
        newest = max(newest, step)
        run.log(dict(metrics), step=newest)

    return told, run.finish


BACK_ENDS: dict[str, Callable[[str, Who], tuple[Log, Close]]] = {
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
    "wandb": _wandb,
}


class Trackers:
    """The trackers of a site, fed by a thread that nothing waits for."""

    def __init__(self, section: LogSection, who: Who) -> None:
        chosen = {name: place for name in BACK_ENDS if (place := getattr(section, name))}
        self._chosen, self._who = chosen, who
        self._points: queue.Queue[tuple[Metrics, int] | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._feed, name="pier-trackers", daemon=True)
        if chosen:
            self._thread.start()

    def told(self, progress: Progress, status: Mapping[str, Any]) -> None:
        """A round is committed: note what is known after it."""
        metrics = {
            "loss": progress.loss,
            "gradient_norm": progress.gradient_norm,
            "validation_loss": progress.validation_loss if progress.validated_round == status["round"] else math.nan,
            "tokens_per_second": progress.tokens_per_second,
            "tokens": progress.tokens,
            "round": status["round"],
            "exchange_seconds": progress.times.exchange,
            "waiting_seconds": progress.times.waiting,
            "bytes_sent": status["bytes_sent"],
            "members": len(status["members"]),
        }
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        self._add(finite, progress.inner_step, f"round {status['round']}")

    def logged(self, metrics: Metrics, step: int) -> None:
        """The site's program has logged metrics of its own."""
        self._add({PREFIX + name: value for name, value in metrics.items()}, step, f"what was logged at step {step}")

    def _add(self, metrics: Metrics, step: int, what: str) -> None:
        if self._thread.is_alive():
            try:
                self._points.put_nowait((metrics, step))
            except queue.Full:
                log.warning("trackers are slow: they miss %s", what)

    def close(self) -> None:
        """Tell the trackers that this is all, within seconds."""
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._points.put(None, timeout=CLOSE_SECONDS)
            self._thread.join(CLOSE_SECONDS)

    def _feed(self) -> None:
        opened = {name: each for name in self._chosen if (each := self._open(name)) is not None}
        while opened and (point := self._points.get()) is not None:
            for name, (told, _) in [*opened.items()]:
                try:
                    told(*point)
                except Exception as error:
                    log.warning("%s gets no more metrics of this site: %s", name, error)
                    del opened[name]
        for name, (_, close) in opened.items():
            try:
                close()
            except Exception as error:
                log.warning("%s: %s", name, error)

    def _open(self, name: str) -> tuple[Log, Close] | None:
        try:
            return BACK_ENDS[name](self._chosen[name], self._who)
        except ImportError:
            log.warning("[log] of %s names %s, which is not installed: pip install %s", SITE_FILE, name, name)
        except Exception as error:
            log.warning("%s gets no metrics of this site: %s", name, error)
        return None
