"""Benchmarks: one file per question, each answered by a table that compares with a peer measured in the same run."""
