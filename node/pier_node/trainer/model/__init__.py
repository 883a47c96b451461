"""The decoder, its initial weights, evaluation, generation, and the Hugging Face format."""
