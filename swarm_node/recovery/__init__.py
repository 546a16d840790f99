"""Getting back to where one was: snapshots of the whole training state."""
