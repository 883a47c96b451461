"""Serves completions from an ensemble of experts."""
