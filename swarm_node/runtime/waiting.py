"""How threads of torch wait for each other. Loads no torch, which reads this once, when it is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Container, MutableMapping

PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}
"""The standard's variable, and for GNU's OpenMP how often a thread looks before it sleeps: some microseconds."""
CHOSEN = (*PASSIVE, "KMP_BLOCKTIME")


def wait_passively(environment: MutableMapping[str, str] = os.environ, loaded: Container[str] = sys.modules) -> bool:
    """Have threads sleep soon while they wait, unless the environment says how they wait or torch is `loaded` already;
    gives whether it was done.

    By default they spin: a thread that is done with its half of a product burns the core which the other half needs, as
    soon as anything else runs. A thread that sleeps at once must be woken for each product, thousands of times a
    second. Results do not depend on it.
    """
    if "torch" in loaded or any(name in environment for name in CHOSEN):
        return False
    environment.update(PASSIVE)
    return True
