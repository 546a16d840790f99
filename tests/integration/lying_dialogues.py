"""The real command line of a member whose dialogues are not those of the environment.

python -m tests.integration.lying_dialogues hint|more|fewer join ...

hint     its environment says something else
more     each dialogue has another answer after its end
fewer    each dialogue of two answers lacks the second
"""

from __future__ import annotations

import sys
from typing import Any

from swarm_node.sharing.publisher import Publisher
from swarm_node.tasks import second_try
from swarm_protocol.messages import SharedRollout

LIE = sys.argv.pop(1)
AS_IT_WAS = Publisher._shared_rollout


def lying(self: Publisher, rollout: Any) -> SharedRollout:
    shared = AS_IT_WAS(self, rollout)
    if LIE == "more":
        return SharedRollout([*shared.turns, shared.turns[-1]], [*shared.heard, bytes(16)])
    return SharedRollout(shared.turns[:1]) if LIE == "fewer" else shared


if LIE == "hint":
    second_try.MORE, second_try.LESS, second_try.NO_NUMBER = ("Say 7.",) * 3  # type: ignore[misc]
Publisher._shared_rollout = lying  # type: ignore[method-assign]

from swarm_node.cli.app import main  # noqa: E402

main()
