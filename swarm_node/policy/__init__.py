"""The node's own language model: loading, sampling, log-probabilities, weights."""
