"""A policy spread over several peers: contiguous layers on each, microbatches in a pipeline, and who holds what."""
