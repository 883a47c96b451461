"""What `pier-node doctor` looks at: one thing a file, gathered in doctor/examination.py."""
