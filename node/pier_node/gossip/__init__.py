"""NoLoCo's rounds of two: rendezvous, exchange, pair commit."""
