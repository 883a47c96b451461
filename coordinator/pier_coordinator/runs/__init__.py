"""The coordinator's view of a run: its sites, its orders, and the read model behind the page."""
