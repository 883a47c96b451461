"""Pier's coordinator: knows a run's sites, gives them orders and shows the run. It is never on the training path."""
