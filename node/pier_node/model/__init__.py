"""The decoder: its presets, its forms, its canonical flat layout, and what is done with a trained one."""
