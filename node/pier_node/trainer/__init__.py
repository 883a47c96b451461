"""Pier's own training program: the workers, the model replica on a device, and how they are launched."""
