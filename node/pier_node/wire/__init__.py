"""What two sites say to each other, whatever carries it: see docs/protocol.md."""
