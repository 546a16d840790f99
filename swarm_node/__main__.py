"""`python -m swarm_node` = `swarm-node`."""

from swarm_node.cli.app import main

main()
