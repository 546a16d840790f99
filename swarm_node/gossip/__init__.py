"""Room 3: own groups go out as text, peers' groups come in and are judged here.

    own groups -> Publisher -> bytes  ~~~ swarm ~~~  bytes -> Receiver -> foreign groups

docs/sharing.md lists every reason for which a group is not sent or not admitted.
"""

from swarm_node.gossip.publisher import Publisher
from swarm_node.gossip.receiver import Receiver

__all__ = ["Publisher", "Receiver"]
