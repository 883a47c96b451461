"""A language model in raw PyTorch, trained across sites: the lines with `pier` or `site` are all that Pier needs.

First site:    python examples/raw_pytorch.py --data site-a
Other sites:   python examples/raw_pytorch.py --data site-b --peers HOST:PORT --token-file run.token
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import pier

CONTEXT, BATCH, VOCABULARY = 64, 16, 256


class Model(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.GRU(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits, [batch, context, vocabulary]."""
        hidden, _ = self.layers(self.embedding(tokens))
        logits: torch.Tensor = self.head(hidden)
        return logits


def main() -> None:
    """Train until the run is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="pier-data", help="folder of this site")
    parser.add_argument("--peers", default=(), nargs="*", help="HOST:PORT of sites of the run; none: found one")
    parser.add_argument("--token-file", help="what the first site has in its folder as run.token")
    parser.add_argument("--listen", default="0.0.0.0:7700")
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()

    torch.manual_seed(0)
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    founding = {
        "run": {"name": "raw-pytorch", "sites": options.sites},
        "inner": {"total_steps": options.steps, "eval_every": 0},
        "outer": {"algorithm": "diloco", "inner_steps": 20},
    }
    site = pier.join(
        model,
        optimizer,
        step_tokens=BATCH * CONTEXT,
        config=None if options.peers else founding,
        peers=options.peers,
        token_file=options.token_file,
        folder=options.data,
        listen=options.listen,
    )
    torch.manual_seed(site.slot)  # other windows at each site
    try:
        while True:
            starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,))
            rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts]).long()
            loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            site.step(tokens=BATCH * CONTEXT, loss=loss)
    except pier.StopTraining as stopped:
        print(f"{stopped}: last training loss {loss.item():.3f}")
    site.close()


if __name__ == "__main__":
    main()
