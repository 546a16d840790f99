"""Configuration of a node: every option, its default and its reason; loading, writing, documenting it.

    training swarm network machine      the sections
        -> figures                      the held-out figure that says how good a run is
        -> node                         all of them together: NodeConfig
        -> keys                         every key
        -> options                      the keys that have an option on the command line
        -> loading (explaining)         file, environment, flags -> NodeConfig, or one line that says what is wrong
        -> writing                      NodeConfig -> TOML; the reference of all keys
        -> own                          config.toml of a run, where its next start begins

Loads no torch.
"""

from swarm_node.config.loading import load_config
from swarm_node.config.network import NetworkConfig
from swarm_node.config.node import NodeConfig
from swarm_node.config.swarm import AveragingConfig, PipelineConfig, SharingConfig
from swarm_node.config.training import GrpoConfig, PolicyConfig, RewardsConfig, RolloutsConfig, TaskConfig
from swarm_node.config.writing import dump_toml

__all__ = [
    "AveragingConfig",
    "GrpoConfig",
    "NetworkConfig",
    "NodeConfig",
    "PipelineConfig",
    "PolicyConfig",
    "RewardsConfig",
    "RolloutsConfig",
    "SharingConfig",
    "TaskConfig",
    "dump_toml",
    "load_config",
]
