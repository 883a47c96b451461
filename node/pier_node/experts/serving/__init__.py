"""Answers from an ensemble of experts over the completions protocol."""
