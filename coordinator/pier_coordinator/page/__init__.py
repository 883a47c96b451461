"""The web page of a run: reading for everybody, actions for the operator, /metrics for Prometheus."""

from pier_coordinator.page.actions import Actions
from pier_coordinator.page.app import make_app

__all__ = ["Actions", "make_app"]
