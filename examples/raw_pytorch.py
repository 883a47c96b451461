"""A language model in raw PyTorch, trained across sites. The lines with `pier` or `site` are all that Pier needs.

First site:    python examples/raw_pytorch.py --data site-a
Other sites:   python examples/raw_pytorch.py --data site-b --peers HOST:PORT --token-file run.token
"""

import torch
import torch.nn.functional as F
from common import CONTEXT, membership, options, rows
from torch import nn

import pier

BATCH = 16


class Model(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.GRU(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits, [batch, context, 256]."""
        hidden, _ = self.layers(self.embedding(tokens))
        logits: torch.Tensor = self.head(hidden)
        return logits


def main() -> None:
    """Train until the run is over."""
    given = options(__doc__, steps=400)
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    site = pier.join(model, optimizer, step_tokens=BATCH * CONTEXT, **membership(given))
    text = rows()[site.slot :: site.slots]
    try:
        while True:
            batch = text[torch.randint(len(text), (BATCH,))]
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            site.step(tokens=batch.numel(), loss=loss)
    except pier.StopTraining as stopped:
        print(f"{stopped}: last training loss {loss.item():.3f}")
    site.close()


if __name__ == "__main__":
    main()
