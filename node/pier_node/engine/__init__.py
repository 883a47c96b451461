"""The contract between the daemon and the program that trains, and both of its ends: see docs/engine.md."""
