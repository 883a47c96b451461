"""The web page of a run: everyone may read it, the operator may act on it, and /metrics serves Prometheus."""

from pier_coordinator.page.actions import Actions
from pier_coordinator.page.app import make_app

__all__ = ["Actions", "make_app"]
