"""A model cut into stages at different sites, and the microbatches that go through them (arXiv 2502.19913)."""
