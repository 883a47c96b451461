"""Tools for every layer, which know nothing of training: errors, durable files, units, tasks, processes."""
