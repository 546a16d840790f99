"""What one stage of a policy calculates, and how layers are divided among stages."""
