"""The checks of `pier-node doctor`, collected in doctor/examination.py."""
