"""Pipeline training: a model cut into stages at different sites, and the microbatches' paths (arXiv 2502.19913)."""
