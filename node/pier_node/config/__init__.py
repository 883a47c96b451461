"""run.toml: its sections, presets, canonical form and hash, and errors that name the key."""
