"""A site's side of the coordinator: how it is let in, what it is told, what it tells. Training never waits for it."""
