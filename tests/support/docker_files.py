"""What docker/compose.yaml starts."""

from __future__ import annotations

from typing import Any

import yaml

from tests.support.repository import ROOT

DOCKER = ROOT / "docker"
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
NODES = ["alice", "bob", "carol"]
"""The services that train."""
