"""The gRPC carrier: direct connections with mutual TLS."""
