"""Rebuilding a lost stage: from a replica, a checkpoint, another crew, or its neighbours (CheckFree)."""
