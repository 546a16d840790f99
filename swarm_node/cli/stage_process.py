"""A process beside another (a pipeline stage of `local`, a bootstrap's page): `swarm-node` that ends with its input."""

from __future__ import annotations

import os
import signal
import threading
import time

from swarm_node.cli.app import main

LEAVE_S = 10.0  # seconds from the end of standard input to the forced end of the process


def _until_stdin_ends() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LEAVE_S)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_until_stdin_ends, name="stdin", daemon=True).start()
    main()
