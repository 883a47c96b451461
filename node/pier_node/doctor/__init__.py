"""What `pier-node doctor` looks at: one thing a file, gathered in examination.py."""
