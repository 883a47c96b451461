"""Lightning across sites. The callback is all that Pier needs.

First site:    python examples/lightning_module.py --data site-a
Other sites:   python examples/lightning_module.py --data site-b --peers HOST:PORT --token-file run.token
"""

import torch
import torch.nn.functional as F
from common import CONTEXT, membership, options, rows
from lightning import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from pier.lightning import PierCallback

BATCH = 8


class Model(LightningModule):
    """Predicts each byte from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 256))

    def training_step(self, batch: torch.Tensor, _index: int) -> torch.Tensor:
        """Loss of a batch, [batch, context]."""
        loss = F.cross_entropy(self.layers(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Train until the run is over."""
    given = options(__doc__, steps=40)
    torch.manual_seed(0)
    pier_callback = PierCallback(step_tokens=BATCH * CONTEXT, **membership(given))
    trainer = Trainer(
        max_steps=given.steps,
        callbacks=[pier_callback],
        accelerator="auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=given.data,
    )
    trainer.fit(Model(), DataLoader(list(rows()), batch_size=BATCH, shuffle=True))
    if pier_callback.site and pier_callback.site.finished:
        print("the run is over")


if __name__ == "__main__":
    main()
