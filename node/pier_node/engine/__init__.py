"""The seam between the daemon and the processes that train: their messages and their supervisor."""
