"""lm-evaluation-harness asks a served model. It is not among the development tools: see docs/serving.md."""

from __future__ import annotations

import asyncio
import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from experts.serving.ensembles import opened, served
from experts.serving.test_single import END, make_hub_model

lm_eval: Any = pytest.importorskip("lm_eval", reason="lm-eval is not installed: docs/serving.md says how to use it")

BEGIN = END + 1
TEXTS = ["import os, sys", "The quick brown fox jumps over the lazy dog."]
ROLLING = """
task: texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""
CHOICE = """
task: choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "import"
doc_to_choice: [" os", " sys", "ant"]
doc_to_target: {best}
metric_list: [{{metric: acc}}]
"""


def evaluated(address: str, folder: Path, tasks: Path) -> Any:
    importlib.import_module("lm_eval.tasks")
    asked = f"model=mine,base_url={address}/v1/completions,tokenizer={folder},max_length=64,num_concurrent=1"
    manager = lm_eval.tasks.TaskManager(include_path=str(tasks), include_defaults=False)
    told = lm_eval.simple_evaluate(
        model="local-completions", model_args=asked, tasks=["texts", "choice"], task_manager=manager, batch_size=2
    )
    return told["results"]


@torch.no_grad()
def log_prob(model: Any, before: list[int], ids: list[int]) -> float:
    logs = torch.log_softmax(model(torch.tensor([[*before, *ids]])).logits[0].double(), -1)
    return sum(float(logs[at - 1, id]) for at, id in enumerate(ids, len(before)))


async def test_its_figures_are_those_of_the_model(tmp_path: Path) -> None:
    folder, tasks, data = make_hub_model(tmp_path / "mine"), tmp_path / "tasks", tmp_path / "texts.jsonl"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    nats = -sum(log_prob(model, [BEGIN], list(text.encode())) for text in TEXTS)
    bits = nats / math.log(2) / sum(len(text) for text in TEXTS)
    choices = [log_prob(model, list(b"import"), list(choice)) for choice in (b" os", b" sys", b"ant")]
    tasks.mkdir()
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (tasks / "texts.yaml").write_text(ROLLING.format(data=data))
    (tasks / "choice.yaml").write_text(CHOICE.format(data=data, best=choices.index(max(choices))))
    async with served(opened(folder, model=folder)) as address:
        found = await asyncio.to_thread(evaluated, address, folder, tasks)
    assert found["texts"]["bits_per_byte,none"] == pytest.approx(bits, abs=1e-4)
    assert found["choice"]["acc,none"] == 1.0
