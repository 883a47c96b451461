"""The carrier interface, the bounds of every message, and the two carriers: gRPC and libp2p."""
