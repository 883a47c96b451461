"""Text in, windows of tokens out: sources, tokenizers, the dealt and cached corpus, a cursor that needs no state."""
