"""Sampling engines: the native one, and transformers' `generate` for architectures that it does not serve."""
