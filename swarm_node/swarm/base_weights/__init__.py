"""The model that a swarm begins with: found on this machine, on the hub or with members, whichever comes first.

manifest's [model] --finding: the cache, --model, the hub's cache--> directory ------> policy.model
                      |  else                                           ^   |
                      |  hub: at once, and not too slowly --------------+   |
                      +- fetching: pieces from members, each checked ---+   v
                                                                         giving: pieces to members
"""
