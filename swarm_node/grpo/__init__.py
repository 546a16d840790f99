"""Group relative policy optimisation: groups of scored rollouts in, one better policy out.

    groups -> advantage -> batch (rows of tokens) -> log-probs -> objective -> backward -> AdamW
                                       policy/logprobs.py                                optimizer
    |---------------------------------- trainer ---------------------------------------------|

docs/grpo.md lists every objective with its formula and source.
"""
