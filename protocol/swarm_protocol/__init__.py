"""What swarm-node peers say to each other: records, limits and errors. No torch, no I/O in the core."""
