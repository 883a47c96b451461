"""Benchmarks: one file a question, each answered by a table against a peer measured in the same run."""
