"""What all examples share: their options, and some text that every machine has."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

CONTEXT = 64
"""Tokens of a sequence; a token is a byte."""


def options(description: str | None, steps: int) -> argparse.Namespace:
    """Where this site is, and whose run it joins."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="pier-data", help="folder of this site")
    parser.add_argument("--peers", default=[], nargs="*", help="HOST:PORT of sites of the run; none: found one")
    parser.add_argument("--token-file", help="what the first site has in its folder as run.token")
    parser.add_argument("--listen", default="0.0.0.0:7700", help="address of this site")
    parser.add_argument("--sites", type=int, default=2, help="sites that the run waits for at first")
    parser.add_argument("--steps", type=int, default=steps, help="inner steps of the run")
    return parser.parse_args()


def membership(given: argparse.Namespace) -> dict[str, Any]:
    """The arguments of pier.join that say which run this is, and where this site's folder lies."""
    run = {
        "run": {"name": "example", "sites": given.sites},
        "inner": {"total_steps": given.steps, "eval_every": 0},
        "outer": {"algorithm": "diloco", "inner_steps": 10},
    }
    way = {"peers": given.peers, "token_file": given.token_file} if given.peers else {"config": run}
    return {**way, "folder": given.data, "listen": given.listen}


def rows() -> torch.Tensor:
    """Text in rows of token ids, [rows, CONTEXT]."""
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    return text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT)
