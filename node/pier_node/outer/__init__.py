"""The outer algorithms as pure functions: optimizers, schedules, means, clipping, codecs, weights and deadlines."""
