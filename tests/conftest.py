"""Every test: one torch thread, offline, a clean SWARM_NODE_* environment, a working directory of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.repository import PYTHONPATH, ROOT

os.environ |= {
    "OMP_NUM_THREADS": "1",  # torch reads it when first imported, here and in processes that tests start
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MPLBACKEND": "agg",
}
settings.register_profile("without a clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("without a clock")  # an example takes as long as a busy machine makes it
pytest_plugins = "tests.support.cpu_time", "tests.support.leaks", "tests.support.shuffle"


@pytest.fixture(autouse=True)
def clean_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing leaks in from the user's environment, nothing is left behind in the repository."""
    for name in [name for name in os.environ if name.startswith("SWARM_NODE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)  # processes that tests start find the packages
    monkeypatch.chdir(tmp_path)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture
def root() -> Path:
    """The repository."""
    return ROOT
