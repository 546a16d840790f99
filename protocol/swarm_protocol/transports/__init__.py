"""Ways to reach other peers: `base` is the port; `memory` simulates it; `p2p` is the real one."""
