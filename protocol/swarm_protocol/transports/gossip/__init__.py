"""GossipSub in a process of its own: its client here, the process there, the pipe between them."""
