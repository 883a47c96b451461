"""LoRA fine-tuning across sites: the weights of the model stay where they are, only the adapters travel.

First site:    python examples/lora.py --data site-a --sites 3
Other sites:   python examples/lora.py --data site-b --peers HOST:PORT --token-file run.token
"""

import torch
from common import CONTEXT, membership, options, rows
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import pier

BATCH, RANK = 8, 4


class Adapted(nn.Module):
    """A frozen linear layer with a trained correction of low rank (Hu et al., arXiv 2106.09685, section 4.1)."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The layer's output with the correction."""
        outputs: torch.Tensor = self.frozen(inputs) + self.up(self.down(inputs))
        return outputs


def main() -> None:
    """Fine-tune until the run is over."""
    given = options(__doc__, steps=40)
    torch.manual_seed(0)  # in earnest: LlamaForCausalLM.from_pretrained(...), the same at every site
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape)).requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
        layer.self_attn.v_proj = Adapted(layer.self_attn.v_proj)
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-3)
    with pier.join(model, optimizer, step_tokens=BATCH * CONTEXT, **membership(given)) as site:
        text = rows()[site.slot :: site.slots]
        while True:
            batch = text[torch.randint(len(text), (BATCH,))]
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if site.finished:
        print("the run is over")


if __name__ == "__main__":
    main()
