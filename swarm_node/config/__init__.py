"""Configuration of a node: every option, its default and its reason; loading, writing, documenting it.

    training swarm network machine      the sections
        -> node                         all of them together: NodeConfig
        -> keys                         every key
        -> options                      the keys that have an option on the command line
        -> loading (explaining)         file, environment, flags -> NodeConfig, or one line that says what is wrong
        -> writing                      NodeConfig -> TOML; the reference of all keys
        -> own                          config.toml of a run, where its next start begins

Loads no torch.
"""

from swarm_node.config.keys import VARIABLE_PREFIX, all_keys
from swarm_node.config.loading import load_config, load_run_config
from swarm_node.config.machine import CheckpointsConfig, HealthConfig, ResourcesConfig, SpotConfig
from swarm_node.config.network import NetworkConfig
from swarm_node.config.node import DEFAULT_ROUNDS, NodeConfig
from swarm_node.config.options import OPTIONS, KeyOption, all_variables
from swarm_node.config.own import dump_own, read_own
from swarm_node.config.section import Section
from swarm_node.config.swarm import AveragingConfig, PipelineConfig, SharingConfig
from swarm_node.config.training import (
    EvalConfig,
    GrpoConfig,
    PolicyConfig,
    RewardFunctionConfig,
    RewardsConfig,
    RolloutsConfig,
    TaskConfig,
)
from swarm_node.config.writing import config_reference, dump_toml

__all__ = [
    "DEFAULT_ROUNDS",
    "OPTIONS",
    "VARIABLE_PREFIX",
    "AveragingConfig",
    "EvalConfig",
    "GrpoConfig",
    "ResourcesConfig",
    "HealthConfig",
    "KeyOption",
    "NetworkConfig",
    "NodeConfig",
    "PolicyConfig",
    "RewardFunctionConfig",
    "RewardsConfig",
    "RolloutsConfig",
    "Section",
    "SharingConfig",
    "CheckpointsConfig",
    "SpotConfig",
    "PipelineConfig",
    "TaskConfig",
    "all_keys",
    "all_variables",
    "config_reference",
    "dump_own",
    "dump_toml",
    "load_config",
    "load_run_config",
    "read_own",
]
