"""Pier's daemon: trains one model at this site, and rarely exchanges an outer round with the other sites."""

__version__ = "0.1.0"
