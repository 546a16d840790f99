"""Room 4: admitted groups of peers wait here until they are trained on.

admitted -> Pool --sampler--> chosen --Gate--> without payloads --own success on that kind of task--> advantages
"""

from swarm_node.replay.gate import Gate
from swarm_node.replay.pool import Pool

__all__ = ["Gate", "Pool"]
