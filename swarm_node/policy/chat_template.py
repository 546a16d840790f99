"""A chat template's frame around questions; a stranger's template runs in a child process with limits.

    template --stdin--> python -I, chat_template_child.py (CPU time, memory, wall time) --stdout--> Frame

The starter's template is this package's own, so it is rendered in this process, which saves the child's 0.2 s.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import lru_cache

from swarm_node.errors import UserError
from swarm_node.policy import chat_template_child
from swarm_node.policy.chat_template_child import Frame, FrameError, frame_of
from swarm_node.policy.starter import CHAT_TEMPLATE

CPU_S = 5  # a frame takes 0.1 s, Python's start included
WALL_S = 60.0  # longest time on a machine that is busy with other things
RUN = "import json, runpy, sys; sys.path += json.loads(sys.argv[2]); runpy.run_path(sys.argv[1], run_name='__main__')"
"""The child's program. An isolated Python ignores the user's own site and PYTHONPATH, where Jinja may be."""


@lru_cache(maxsize=16)
def frame_around(template: str, system: str, special: str, model: str) -> Frame:
    """The frame of a chat template. UserError if the template fails, takes too long, or has no frame.

    special  the tokenizer's special tokens by name, as JSON
    model    whose template it is, for the message
    """
    if template == CHAT_TEMPLATE:
        try:
            return frame_of(template, system, json.loads(special))
        except FrameError as error:
            raise UserError(f"the chat template of {model} fails: {error}") from error
    asked = json.dumps({"template": template, "system": system, "special": json.loads(special)})
    try:
        done = subprocess.run(child(), input=asked.encode(), capture_output=True, timeout=WALL_S)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"the chat template of {model} takes longer than {WALL_S:.0f} s: it is refused") from error
    if done.returncode > 0:  # not the template's fault: its errors come on standard output
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
    return [sys.executable, "-I", *options, "-c", RUN, chat_template_child.__file__, paths, str(CPU_S)]
