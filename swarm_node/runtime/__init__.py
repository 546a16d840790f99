"""A run around a node: its directory, signals, console, resume and report."""
