"""Which text a site trains on: its part of the run's data, or all of its own (`--dataset`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pier_node.config.run import RunConfig
from pier_node.trainer.data.sources import no_text, open_source
from pier_node.trainer.data.tokens import check_vocab, open_tokenizer


@dataclass(frozen=True)
class SiteData:
    """A site's training data. Nobody trains on the documents to validate on, whatever the part.

    Attributes:
        slot, slots: it trains on part `slot` of `slots` of the documents.
        path: replaces data.path here; None: as the run says.
    """

    slot: int = 0
    slots: int = 1
    path: str | None = None

    @classmethod
    def of(cls, config: RunConfig, slot: int, dataset: str | None, shared: bool) -> Self:
        """What the site with this slot trains on.

        Data of its own is nobody else's, so all of it is for this site. Data that every site has is dealt.

        Args:
            dataset: path of --dataset.
            shared: it holds the same as at the other sites (--shared-data).
        """
        own = dataset is not None and not shared
        return cls(0, 1, dataset) if own else cls(slot % config.run.sites, config.run.sites, dataset)

    def describe(self, config: RunConfig) -> str:
        """One sentence for the site's owner."""
        held_out = f"all of it but the {100 * config.data.validation:.3g} % to validate on"
        part = f"part {self.slot + 1} of {self.slots}" if self.slots > 1 else held_out
        if self.path is None:
            name = "the built-in text" if config.data.source == "stdlib" else f"data.path = {config.data.path}"
            return f"This site trains on {part} of {name}, which is the same at every site."
        if self.slots > 1:
            return f"This site trains on {part} of {self.path}: a copy of the run's data, which is dealt to the sites."
        return (
            f"This site trains on its own data, {self.path}: {held_out}. "
            "If every site has a copy of the same data, start with --shared-data."
        )


def check_data(config: RunConfig, dataset: str | None) -> None:
    """Look at the tokenizer and the first document.

    Raises:
        PierError: they cannot be used, or there is no text, or the tokenizer has more tokens than the model.
    """
    check_vocab(open_tokenizer(config.data.tokenizer).vocab_size, config.model.vocab_size)
    if next(open_source(config.data, dataset).documents(), None) is None:
        raise no_text()
