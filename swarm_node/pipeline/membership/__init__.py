"""Which peer of a crew holds which stage, and which peer leads."""
