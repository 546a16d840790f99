"""A run on disk: its directory, its checkpoints, their copies elsewhere."""
