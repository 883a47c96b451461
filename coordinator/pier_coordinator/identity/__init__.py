"""The run's folder and authority at its coordinator, and who may connect."""
