"""An ensemble of domain experts that predict together, after HDEE (arXiv 2502.19385)."""
