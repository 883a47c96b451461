"""The coordinator's durable state: a SQLite database with one writer, and a log of its facts beside it."""
