"""Groups of rollouts that peers share: published here, admitted or refused here, drawn for training from a buffer.

own groups -> Publisher -> bytes  ~~~ swarm ~~~  bytes -> Receiver -> ReplayBuffer -> sampler -> Gate -> advantages

docs/sharing.md lists every reason for which a group is not sent or not admitted.
"""

from swarm_node.sharing.balance import Balance
from swarm_node.sharing.gate import Gate
from swarm_node.sharing.publisher import Publisher
from swarm_node.sharing.receiver import Receiver
from swarm_node.sharing.replay_buffer import ReplayBuffer

__all__ = ["Balance", "Gate", "ReplayBuffer", "Publisher", "Receiver"]
