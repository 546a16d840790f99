"""swarm-node: one command makes any machine a peer that improves its own language model by reinforcement learning."""

__version__ = "0.1.0"
