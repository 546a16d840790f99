"""Finding a swarm, joining it, and being a member: manifest, network, question files, the base model."""
