"""Who trains which expert, how large and for how long: spec/hdee.md, sections 2.2 to 2.5. Plain functions."""
