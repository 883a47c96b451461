"""The web page of a run: everyone may read it, the operator may act on it, and /metrics serves Prometheus."""
