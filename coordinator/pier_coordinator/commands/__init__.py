"""What the commands of pier-coordinator do; cli.py says how they are called."""
