"""The command line."""

import sys

if sys.platform == "win32":  # before modules are imported that it lacks
    raise SystemExit("swarm-node: Windows is not supported; install swarm-node in WSL 2 (docs/install.md)")
