"""What a node says before it joins a swarm: what leaves this machine, and to whom."""

from __future__ import annotations

from swarm_node.config import NodeConfig
from swarm_node.say import Say
from swarm_node.storage.rundir import RunDir
from swarm_node.swarm.links import Swarm, kept_manifest


def say_what_leaves(swarm: Swarm, config: NodeConfig, run: RunDir, say: Say, trains: bool = True) -> None:
    """Say what members will see of this machine, before they do: once for each swarm and run directory. Nothing is
    said of a swarm that was made here for processes of this machine."""
    kept = kept_manifest(run)
    if (not swarm.named and config.network.listen == "127.0.0.1") or (kept is not None and kept.swarm_id == swarm.id):
        return
    weights = config.averaging.method != "none" or config.pipeline.stages > 0
    points = ["your IP address and the node's name" + (", its speed and its kind of model" if trains else "")]
    if trains:
        points.append("every answer that your model writes" + (", and the weights that it trains" if weights else ""))
    if trains and config.sharing.declare:
        points.append("its success, its version, and whose answers it uses (sharing.declare)")
    if config.sharing.give_model and (swarm.manifest is None or swarm.manifest.model is not None):
        if_any = "" if swarm.manifest else ", if it has one"
        points.append(f"the files of the swarm's model{if_any} (sharing.give_model)")
    relay = "others may connect through you (--relay)" if config.network.serve_relay else "nothing is relayed (--relay)"
    points.append(f"{relay}; no other file is sent")
    stored = f"\nAnswers of others are kept in {run.path}, and never executed." if trains else ""
    seen = "".join(f"\n  - {point}" for point in points)
    say(f"first time in this swarm. Its members, anybody with its link, will see:{seen}{stored}")
