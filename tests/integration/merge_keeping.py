"""`swarm-node`, with the weights that `merge` fetches kept besides.

python merge_keeping.py FOLDER merge …        FOLDER gets a safetensors file of each source
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from swarm_node.cli.app import app
from swarm_node.cli.commands import merge_swarm as merging_swarm

gather = merging_swarm.gather


def keeping(*args: Any, **kwargs: Any) -> Any:
    weights, versions = gather(*args, **kwargs)
    for name, state in weights.items():
        save_file({key: tensor.clone() for key, tensor in state.items()}, folder / f"{name.split()[0]}.safetensors")
    return weights, versions


folder = Path(sys.argv[1])
merging_swarm.gather = keeping
app(sys.argv[2:], prog_name="swarm-node")
