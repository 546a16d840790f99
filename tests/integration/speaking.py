"""The real command line of a release whose newest protocol is another one: it speaks that and the one before.

    python -m tests.integration.speaking VERSION join ...

The formats are those of this release: versions differ in their number, which is what peers go by.
"""

from __future__ import annotations

import sys

from swarm_protocol import messages

assert "swarm_protocol.codec" not in sys.modules  # nobody has read the version yet
messages.PROTOCOL_VERSION = int(sys.argv.pop(1))

from swarm_node.cli.app import main  # noqa: E402

main()
