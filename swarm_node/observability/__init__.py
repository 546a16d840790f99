"""What a run tells people: metrics, progress, plots."""
