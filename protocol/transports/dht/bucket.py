"""Who gives way in a bucket of stored cards that is full. Pure.

a card that its own peer brings takes the place of one that others brought, else of a peer that is not connected
a card that others bring takes no place in a full bucket
"""

from __future__ import annotations

import random
from collections.abc import Collection


def gives_way(
    held: Collection[str], own: Collection[str], connected: Collection[str], is_own: bool, rng: random.Random
) -> str | None:
    """Of the peers `held` in a full bucket, drawn by chance, the one whose card makes room for a newcomer's; None = the
    newcomer is refused. `own` = those whose cards came from themselves."""
    if not is_own:
        return None
    strangers = [peer for peer in held if peer not in connected]
    brought = [peer for peer in strangers if peer not in own]
    choice = brought or strangers
    return rng.choice(choice) if choice else None
