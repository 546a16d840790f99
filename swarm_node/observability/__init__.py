"""The figures of a run, for people: metrics, progress, plots."""
