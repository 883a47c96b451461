"""Pier's own training program: workers, the replica on a device, and how both are launched."""
