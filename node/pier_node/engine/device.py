"""What a site's program trains on, as the program says, and how well it is used."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from pier_node.engine.messages import Ready

log = logging.getLogger(__name__)


@dataclass
class Device:
    """All devices of a site together.

    Attributes:
        words: names, number, memory and precision; "": the program does not tell.
        full_speed: tokens per second of the model's FLOPs at the devices' peak; 0: not known.
        peak_bytes: most memory that was taken of one device; 0 on a CPU, or if the program does not tell.
    """

    words: str = ""
    full_speed: float = 0.0
    peak_bytes: int = 0

    def told(self, ready: Ready) -> None:
        """Take what the program says of its devices, and say it in the log."""
        self.words, self.full_speed = ready.device, ready.full_speed
        if ready.fallback:
            log.warning(
                "TRAINING ON THE CPU: %s. See `nvidia-smi` and `python -m torch.utils.collect_env`", ready.fallback
            )
        if self.words:
            log.info("training on %s", self.words)

    def mfu(self, tokens_per_second: float) -> float:
        """Model FLOPs utilisation (PaLM, arXiv 2204.02311, appendix B); NaN: not known."""
        return tokens_per_second / self.full_speed if self.full_speed else math.nan
