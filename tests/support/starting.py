"""Start a run as `swarm-node local` does, in this process."""

from __future__ import annotations

from swarm_node.config import NodeConfig
from swarm_node.runtime.callbacks import Manner
from swarm_node.runtime.start import start
from swarm_node.storage.rundir import RunDir


def train_locally(config: NodeConfig, json_output: bool = False) -> int:
    """Train alone until the run is over; the exit code. Raises UserError."""
    with RunDir.open(config.directory) as run:
        start(config, run, None, Manner(json_output))
        return 0
