"""Export the trained policy of a run: the newest good snapshot in Hugging Face layout, apart from resume state."""
