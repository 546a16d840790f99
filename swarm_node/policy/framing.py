"""Run a stranger's chat template in a child process with limits, and get the frame that it puts around questions.

    template --stdin--> python -I, chat_frame.py (CPU time, memory, wall time) --stdout--> Frame

The starter's own template is rendered in this process: it is this package's, and saves the child's 0.2 s.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import lru_cache

from swarm_node.errors import UserError
from swarm_node.policy import chat_frame
from swarm_node.policy.chat_frame import Frame, FrameError, frame_of

CPU_S = 5
"""A frame takes 0.1 s, Python's start included."""
WALL_S = 60.0
"""On a machine that is busy with other things."""
RUN = "import json, runpy, sys; sys.path += json.loads(sys.argv[2]); runpy.run_path(sys.argv[1], run_name='__main__')"
"""What the child runs. An isolated Python ignores the user's own site and PYTHONPATH; Jinja may be there."""


@lru_cache(maxsize=16)
def framed(template: str, system: str, special: str, model: str, trusted: bool = False) -> Frame:
    """The frame of a chat template; `special` is JSON of the tokenizer's special tokens by name. A `trusted` one is
    rendered here. UserError, with the name of the `model`, if the template fails, takes too long, or has no frame."""
    if trusted:
        try:
            return frame_of(template, system, json.loads(special))
        except FrameError as error:
            raise UserError(f"the chat template of {model} fails: {error}") from error
    asked = json.dumps({"template": template, "system": system, "special": json.loads(special)})
    try:
        done = subprocess.run(child(), input=asked.encode(), capture_output=True, timeout=WALL_S)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"the chat template of {model} takes longer than {WALL_S:.0f} s: it is refused") from error
    if done.returncode > 0:  # not the template's fault, whose errors are told
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise UserError(f"the chat template of {model} cannot be rendered: {said[:200]}")
    if done.returncode < 0:
        raise UserError(f"the chat template of {model} takes more than {CPU_S} s or 1 GiB: it is refused")
    told = json.loads(done.stdout)
    if "error" in told:
        raise UserError(f"the chat template of {model} fails: {told['error']}")
    return Frame(*told["frame"])


def child(*options: str) -> list[str]:
    """The command that renders a template; `options` are Python's."""
    paths = json.dumps([*map(str, sys.path)])
    return [sys.executable, "-I", *options, "-c", RUN, chat_frame.__file__, paths, str(CPU_S)]
