"""Small ensembles on the disk, with random weights that predict unlike things."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from pier_node.commands.serve import ServeOptions, open_models
from pier_node.config.run import ModelSection
from pier_node.experts.serving.app import make_app
from pier_node.experts.serving.generation import Asking
from pier_node.experts.serving.plugging import Plugs
from pier_node.outer.layout import Layout
from pier_node.trainer.model.export import export

torch.set_num_threads(1)
NAMES = ("topics", "encodings", "network")
GB = 1e9


def config_of(number: int) -> ModelSection:
    """Experts have unlike sizes."""
    return ModelSection(preset="llama-tiny", ffn_dim=48 + 16 * number, context=32)


def make_expert(folder: Path, number: int) -> Path:
    """An exported model whose weights follow from its number."""
    config = config_of(number)
    generator = torch.Generator().manual_seed(number)
    return export(config, torch.randn(Layout.of(config).length, generator=generator) * 0.2, folder)


def make_ensemble(folder: Path, names: Sequence[str] = NAMES) -> Path:
    """An ensemble with an expert for each name, in folders e0, e1, ..."""
    members = []
    for number, name in enumerate(names):
        make_expert(folder / f"e{number}", number)
        members.append({"domain": name, "folder": f"e{number}", "stands_in": True})
    (folder / "ensemble.json").write_text(json.dumps({"members": members}))
    return folder


def options(folder: Path, **changed: Any) -> ServeOptions:
    told = {"listen": "127.0.0.1:0", "top_k": 0, "memory": 0.0, "posterior": "decay", "device": "cpu", **changed}
    return ServeOptions(**{"model": None, "experts": None if "model" in told else folder, **told})


def opened(folder: Path, **changed: Any) -> Asking:
    """The ensemble of a folder, as `pier-node serve` would open it."""
    return open_models(options(folder, **changed))


@asynccontextmanager
async def served(asking: Asking, plugs: Plugs | None = None) -> AsyncIterator[str]:
    """The address of an ensemble that is served."""
    runner = web.AppRunner(make_app(asking, plugs), access_log=None, shutdown_timeout=2.0, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
        asking.close()
