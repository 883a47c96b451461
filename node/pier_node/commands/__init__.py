"""What the commands of `pier-node` do, one file a command; cli.py says how they are called."""
