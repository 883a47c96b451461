"""The gRPC service that sites call: identifies callers, checks and limits requests, and answers them."""
