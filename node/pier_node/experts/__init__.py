"""An ensemble of domain experts that predict together (spec/hdee.md, after arXiv 2502.19385)."""
