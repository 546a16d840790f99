"""`python -m swarm_node` = `swarm-node`."""

from swarm_node.cli import main

main()
