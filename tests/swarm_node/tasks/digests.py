"""Print digests of what every allowed environment makes; test_task_environments.py runs it in a fresh process.

After auditing a new reasoning-gym:

    PYTHONHASHSEED=2 python tests/swarm_node/tasks/digests.py > tests/data/task_digests.json
"""

from __future__ import annotations

import hashlib
import json

from swarm_node.tasks.catalogue import ALLOWED, SETS
from swarm_node.tasks.reasoning_gym import ReasoningGym

ITEMS = 20


def digest(source: ReasoningGym) -> str:
    """sha256 of the questions and answers of items spread over the whole index space."""
    texts = []
    for index in range(0, source.size, source.size // ITEMS):
        task = source.task(index)
        texts.append((index, task and task.question, task and task.answer))
    return hashlib.sha256(json.dumps([source.config, texts]).encode()).hexdigest()


def main() -> None:
    sources = {name: ReasoningGym(name, {}) for name in ALLOWED}
    sources |= {f"small/{name}": ReasoningGym(name, options) for name, options in SETS["small"].items()}
    digests = {name: digest(source) for name, source in sources.items()}
    print(json.dumps({"generator": sources["gcd"].generator, "digests": digests}, indent=1))


if __name__ == "__main__":
    main()
