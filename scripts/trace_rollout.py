"""Which files of this project a rollout crosses on its way to the optimiser step.

    .venv/bin/python scripts/trace_rollout.py [--most 24]

own       from the sampling engine to the optimiser step of the node that sampled it
foreign   from the bytes of a batch at `Receiver.take` to the optimiser step; another node in this process made the
          batch with its own `Publisher`, and the memory transport carried it

A file counts if one of its functions runs meanwhile, in any thread. Importing a module does not count. With `--most`,
the exit status is 1 if either way crosses more files than that.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, FunctionType

from swarm_node.config import NodeConfig
from swarm_node.grpo.optimizer import Optimizer
from swarm_node.node import Node
from swarm_node.policy.policy import Policy
from swarm_node.runtime.simulation import Peer, Simulation, manifest_for
from swarm_node.sharing import Receiver

ROOT = Path(__file__).resolve().parent.parent
PARTS = f"{ROOT}/swarm_node/", f"{ROOT}/protocol/"
ASIDE = (
    *("protocol/swarm_protocol/transports/memory/", "swarm_node/runtime/simulation.py"),
    *("swarm_node/policy/vetting.py", "swarm_node/types.py"),
)
"""Files that are not counted. The first two stand for the network and its clock. The third counts the modules that a
model makes while it is loaded; its hook also runs when transformers slices a list of layers in a forward pass. The last
has the rollouts themselves, with properties of one line."""
ROUNDS = 20
"""Rounds that are sampled at most until a group has both right and wrong answers."""
SETTLED_S, ARRIVED_S = 10.0, 0.5
"""Virtual seconds until the nodes have found each other, and until a batch has arrived."""


@contextmanager
def traced(beginning: FunctionType) -> Iterator[set[str]]:
    """Collect the files whose functions start from the first call of `beginning` to the end of the optimiser step."""
    files: set[str] = set()
    begun = ended = False

    def called(frame: FrameType, event: str, argument: object) -> None:
        nonlocal begun, ended
        code = frame.f_code
        begun = begun or code is beginning.__code__
        ended = ended or (begun and event == "return" and code is Optimizer.apply.__code__)
        is_function = event == "call" and code.co_flags & inspect.CO_OPTIMIZED  # else a module's or a class's own code
        if begun and not ended and is_function and code.co_filename.startswith(PARTS):
            file = str(Path(code.co_filename).relative_to(ROOT))
            if not file.startswith(ASIDE):
                files.add(file)

    threading.setprofile(called)
    sys.setprofile(called)
    try:
        yield files
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    if not begun:
        raise SystemExit(f"{beginning.__qualname__} was never called")


def nodes() -> tuple[Node, Node, Simulation]:
    """Two members of one swarm over the memory transport; they sample the small tasks with the starter policy. They
    average no weights: that happens beside the way of rollouts."""
    table = {"rollouts": {"max_new_tokens": 16, "groups": 8}, "averaging": {"method": "none"}}
    config = NodeConfig.model_validate({**table, "policy": {"threads": 1}, "seed": 0})
    peers = [Peer(config.model_copy(update={"seed": seed})) for seed in range(2)]
    simulation = Simulation(manifest_for(config), peers)
    return peers[0].node, peers[1].node, simulation


def own_way(node: Node) -> set[str]:
    """Files that the node's own groups cross."""
    for _ in range(ROUNDS):
        with traced(Policy.generate) as files:
            own = node.collect().groups
            before = node.policy.version
            node.learn(own)
        if node.policy.version > before:
            return files
    raise SystemExit("no group of its own taught the node anything")


def foreign_way(node: Node, sender: Node, simulation: Simulation) -> set[str]:
    """Files that groups of `sender` cross at `node`."""
    assert sender.member is not None and node.member is not None
    for _ in range(ROUNDS):
        simulation.clock.run_until(simulation.clock.now() + SETTLED_S)
        with traced(Receiver.take) as files:
            sender.share(sender.collect())
            sender.member.publisher.flush()
            simulation.clock.run_until(simulation.clock.now() + ARRIVED_S)
            chosen = node.choose(node.collected)
            before = node.policy.version
            node.learn(chosen)
        if chosen and node.policy.version > before:
            return files
    raise SystemExit("no foreign group taught the node anything")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, help="fail above this number of files")
    most = parser.parse_args().most
    node, sender, simulation = nodes()
    ways = {"own": own_way(node), "foreign": foreign_way(node, sender, simulation)}
    for name, files in ways.items():
        print(f"{name}: {len(files)} files")
        print(*(f"  {file}" for file in sorted(files)), sep="\n")
    return int(most is not None and max(map(len, ways.values())) > most)


if __name__ == "__main__":
    sys.exit(main())
