"""The wire contract of Pier, version 1: generated from the .proto files beside this one by scripts/gen-protos."""
