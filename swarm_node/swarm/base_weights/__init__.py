"""The model that a swarm begins with: from this machine, else from the Hugging Face hub, else from members.

manifest's [model] --finding: the cache, --model, the hub's cache--> directory ------> policy.model
                      |  else                                           ^   |
                      |  hub: at once, and not too slowly --------------+   |
                      +- fetching: pieces from members, each checked ---+   v
                                                                         giving: pieces to members
"""
