"""What the coordinator must not forget: a SQLite database with one writer, and a log of its facts beside it."""
