"""The text that a site trains on: its part of the run's data, or all of its own (`--dataset`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pier_node.config.run import RunConfig
from pier_node.trainer.data.sources import no_text, open_source
from pier_node.trainer.data.tokens import check_vocab, open_tokenizer


@dataclass(frozen=True)
class SiteData:
    """A site's training data. No site trains on the validation documents, whatever its part.

    Attributes:
        slot, slots: it trains on part `slot` of `slots` of the documents.
        path: replaces data.path here; None: as in the run's configuration.
    """

    slot: int = 0
    slots: int = 1
    path: str | None = None

    @classmethod
    def of(cls, config: RunConfig, slot: int, dataset: str | None, shared: bool) -> Self:
        """The training data of the site with this slot.

        A site's own data belongs to no other site, so it trains on all of it. Data that every site has is divided.

        Args:
            dataset: path of --dataset.
            shared: it contains the same data as at the other sites (--shared-data).
        """
        own = dataset is not None and not shared
        return cls(0, 1, dataset) if own else cls(slot % config.run.sites, config.run.sites, dataset)

    def describe(self, config: RunConfig) -> str:
        """One sentence for the site's operator."""
        held_out = f"all except the {100 * config.data.validation:.3g} % validation split"
        part = f"part {self.slot + 1} of {self.slots}" if self.slots > 1 else held_out
        if self.path is None:
            name = "the built-in text" if config.data.source == "stdlib" else f"data.path = {config.data.path}"
            return f"This site trains on {part} of {name}, which is the same at every site."
        if self.slots > 1:
            return f"This site trains on {part} of {self.path}: a copy of the run's data, divided among the sites."
        return (
            f"This site trains on its own data, {self.path}: {held_out}. "
            "If every site has a copy of the same data, start with --shared-data."
        )


def check_data(config: RunConfig, dataset: str | None) -> None:
    """Check the tokenizer and the first document.

    Raises:
        PierError: they cannot be used, there is no text, or the tokenizer has more tokens than the model.
    """
    check_vocab(open_tokenizer(config.data.tokenizer).vocab_size, config.model.vocab_size)
    if next(open_source(config.data, dataset).documents(), None) is None:
        raise no_text()
