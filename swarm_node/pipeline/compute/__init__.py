"""The computation of one stage of a policy, and how layers are divided among stages."""
