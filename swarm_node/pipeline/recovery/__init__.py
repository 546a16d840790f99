"""How a lost stage is rebuilt: from a replica, a checkpoint, a peer's copy, or its neighbours (CheckFree)."""
