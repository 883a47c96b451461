"""The run's folder and certificate authority at the coordinator, and TLS: who may connect."""
