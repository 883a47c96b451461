"""From text to windows of tokens: sources, tokenizers and the corpus of a site."""
