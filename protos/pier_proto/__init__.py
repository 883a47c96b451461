"""Messages that Pier's processes exchange, by version."""
