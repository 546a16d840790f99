"""How threads of torch wait for each other. Loads no torch, which reads this once, when it is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Container, MutableMapping

PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
"""The standard's variable, and the one that GNU's OpenMP obeys to the letter."""
CHOSEN = (*PASSIVE, "KMP_BLOCKTIME")


def wait_passively(environment: MutableMapping[str, str] = os.environ, loaded: Container[str] = sys.modules) -> bool:
    """Have threads sleep while they wait, unless the environment says how they wait or torch is `loaded` already; gives
    whether it was done.

    By default they spin: a thread that is done with its half of a product burns the core which the other half needs, as
    soon as anything else runs. Results do not depend on it.
    """
    if "torch" in loaded or any(name in environment for name in CHOSEN):
        return False
    environment.update(PASSIVE)
    return True
