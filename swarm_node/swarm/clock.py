"""Whether this machine's clock lets others hear a node: their cards show what time it is there."""

from __future__ import annotations

import sys

from swarm_node.say import Once, Warned
from swarm_protocol.limits import MAX_CLOCK_SKEW_S
from swarm_protocol.transports.base import Transport

SET_CLOCK = "sudo sntp -sS time.apple.com" if sys.platform == "darwin" else "sudo timedatectl set-ntp true"


def say_clock(transport: Transport, once: Once) -> None:
    """Say `once` that the clock is wrong, if it is, and nobody is a member by it."""
    ahead = transport.clock_ahead()
    if ahead is None or abs(ahead) <= MAX_CLOCK_SKEW_S or transport.members():
        return
    side = "ahead of" if ahead > 0 else "behind"
    once(
        "clock",
        Warned(
            f"this machine's clock is {abs(ahead):.0f} s {side} the other members', and {MAX_CLOCK_SKEW_S:g} s are the "
            f"most: nobody can hear this node; set it with `{SET_CLOCK}`"
        ),
    )
