"""The exchange between sites: pure algorithms, and the atomic round that applies them."""
