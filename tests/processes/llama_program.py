"""transformers' Llama as a user would train it, for tests: `python llama_program.py RUN_TOML FOLDER`.

RUN_TOML is that of a run of Pier's own trainer, FOLDER that of this site. The program has the same weights to begin
with, the same batches, the same settings, and PyTorch's own AdamW.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import pier
from pier_node.config.run import ModelSection, RunConfig, load
from pier_node.identity.node import Identity
from pier_node.outer.layout import Layout
from pier_node.outer.schedule import learning_rate
from pier_node.trainer.data.corpus import Windows, open_corpus
from pier_node.trainer.model.export import rules, to_config
from pier_node.trainer.model.initial import initial_weights


def llama(config: ModelSection, seed: int) -> LlamaForCausalLM:
    """Their model with the weights that Pier's own trainer begins with."""
    model = LlamaForCausalLM(LlamaConfig(**to_config(config)))
    ours = Layout.of(config).views(initial_weights(config, seed))
    model.load_state_dict({rule.theirs: rule.join(ours) for rule in rules(config)}, strict=not config.tie_embeddings)
    return model


def in_our_order(config: ModelSection, model: LlamaForCausalLM) -> nn.ParameterList:
    """Their parameters in the order in which Pier's own trainer has them, so that anchors have the same digest."""
    theirs = {rule.ours[0]: rule.theirs for rule in rules(config)}
    parameters = dict(model.named_parameters())
    return nn.ParameterList([parameters[theirs[entry.name]] for entry in Layout.of(config).entries])


def batches(config: RunConfig, site: pier.Site, folder: Path) -> Windows:
    """The batches of Pier's own trainer at the site in a folder."""
    corpus = open_corpus(config.data, site.slot, site.slots, None, folder / "tokens")
    return Windows(corpus, config.model.context, config.run.seed, Identity.load_or_create(folder).node)


def main() -> None:
    """Train until the run is over."""
    config, folder = load(Path(sys.argv[1])), Path(sys.argv[2])
    inner = config.inner
    model = llama(config.model, config.run.seed)
    parameters = in_our_order(config.model, model)
    decayed = [parameter for parameter in parameters if parameter.dim() > 1]
    others = [parameter for parameter in parameters if parameter.dim() == 1]
    groups = [
        {"params": decayed, "weight_decay": inner.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(inner.beta1, inner.beta2), eps=1e-8, fused=True)
    site = pier.join(parameters, optimizer, step_tokens=inner.batch_size * config.model.context)
    windows = batches(config, site, folder)
    try:
        while True:
            inputs, labels = (torch.tensor(part) for part in windows.batch(site.step_index, inner.batch_size))
            loss: Tensor = model(input_ids=inputs, labels=labels, shift_labels=labels).loss
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(parameters, inner.clip_norm)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(site.step_index, inner)
            optimizer.step()
            optimizer.zero_grad()
            site.step(tokens=labels.numel(), loss=loss)
    except pier.StopTraining:
        site.close()


if __name__ == "__main__":
    main()
