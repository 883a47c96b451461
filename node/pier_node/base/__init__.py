"""What every layer uses and that knows nothing of training: errors, durable files, units, tasks, processes."""
