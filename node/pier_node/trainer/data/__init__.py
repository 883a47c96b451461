"""From text to windows of tokens: sources, tokenizers, the corpus of a site."""
