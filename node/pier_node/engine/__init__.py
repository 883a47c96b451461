"""The interface between the daemon and its worker processes: their messages and their supervisor."""
