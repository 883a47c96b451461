"""The gRPC service that sites talk to: who calls, what they may send, what they are told."""
