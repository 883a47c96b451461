"""The run's folder and certificate authority at the coordinator."""
