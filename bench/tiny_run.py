"""The run.toml of benches that are about what sites do, not about what they learn: the smallest model, on a text that
every machine has."""

from __future__ import annotations

import argparse


def tiny_run(sites: int, total_steps: int, inner_steps: int, overlap: bool = False, algorithm: str = "diloco") -> str:
    """The text; nothing is validated on the way."""
    return f"""
[run]
sites = {sites}
[model]
preset = "llama-tiny"
[data]
source = "text"
path = "{argparse.__file__}"
[inner]
total_steps = {total_steps}
batch_size = 2
eval_every = 0
[outer]
algorithm = "{algorithm}"
inner_steps = {inner_steps}
overlap = {str(overlap).lower()}
"""
