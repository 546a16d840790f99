"""Where the repository is."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHONPATH = f"{ROOT}{os.pathsep}{ROOT / 'protocol'}"  # where processes that tests start find the packages
