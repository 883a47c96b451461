"""Pier's coordinator: knows the sites of a run, tells them what to do, and shows it all. Never on the training path."""
