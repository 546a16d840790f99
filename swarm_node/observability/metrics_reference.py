"""Every number of metrics.jsonl and of /metrics, and its meaning. `tests/swarm/test_metrics_reference.py` compares it
with real runs.

`<…>` in a name stands for any text. A line leaves out numbers that its round does not have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

METRICS: dict[str, dict[str, str]] = {
    "The round": {
        "round": "Rounds that have ended, this one included.",
        "rounds": "Rounds that the line stands for, this one and those before it ([thinning]"
        "(../dashboard.md#long-runs)). Missing while 1.",
        "step": "Version of the policy: updates, and exchanges of weights, so far.",
        "time": "Unix time, in seconds, at the end of the round.",
        "step_time": "Seconds from the beginning of the round to its end, updates included.",
        "num_tokens": "Tokens of the answers that made updates, each with its prompt: a running total. Answers without "
        "an advantage do not count.",
        "perf/generated_tok_s": "Tokens sampled per second, while sampling.",
        "perf/trained_tok_s": "Tokens trained on per second, in the update. Missing in a round without one.",
        "perf/reward_share": "Part of the round that reward functions took, in [0, 1]. Missing without "
        "`rewards.functions`.",
    },
    "Reward": {
        "reward": "Mean over all own answers of the round, before any filter.",
        "reward_std": "Mean over own groups of the standard deviation within the group.",
        "frac_reward_zero_std": "Share of own groups whose rewards are all equal: nothing to learn from.",
        "reward/<task>": "Mean reward on that kind of task, if it was among those of the round.",
        "rewards/<function>/mean": "Mean of what that reward function gave, before its weight, over the own answers "
        "that it scored; `checker` = the task's own checker. Missing without `rewards.functions`, if it scored none, "
        "and beyond the first 16 rewards.",
        "rewards/<function>/std": "Standard deviation of the same rewards. Missing as their mean is, and if that "
        "function scored a single answer.",
        "tasks/too_long": "Tasks skipped in this round because their prompts are too long. Missing while 0.",
        "tasks/not_encoded": "Tasks skipped in this round as the tokenizer failed at their prompts. Missing while 0.",
        "tasks/scorer_errors": "Answers on which a checker raised, so far: they score 0. Missing while 0.",
    },
    "Answers": {
        "completions/mean_length": "Tokens of own answers, mean.",
        "completions/min_length": "Tokens of the shortest own answer.",
        "completions/max_length": "Tokens of the longest own answer.",
        "completions/clipped_ratio": "Share of own answers that did not end by themselves.",
    },
    "Held-out questions": {
        "eval/pass_1": "Share of right answers to held-out questions (pass@1), measured after the round. Only in "
        "rounds with an evaluation (`eval.every`), and if a checker judges the answers; /metrics has the latest.",
        "eval/pass_k": "Share of held-out questions of which any of `eval.samples` answers is right (pass@k). Missing "
        "as `eval/pass_1`.",
        "eval/reward": "Mean reward of the answers to held-out questions. Only in rounds with an evaluation, and with "
        "`rewards.functions` or `rewards.partial`; /metrics has the latest.",
    },
    "The update": {
        "loss": "The loss, summed over tokens with its normaliser; mean over the updates of the round.",
        "grad_norm": "Norm of the gradient before clipping; 0 in a round without an update.",
        "learning_rate": "Step size of the last update. Missing in a round without one.",
        "entropy": "Mean entropy of the policy, in nats, over the tokens computed.",
        "kl": "Mean k3 divergence from the reference policy. With `grpo.beta` only.",
        "clip_ratio/low_mean": "Share of tokens (sequences, if the ratio is theirs) clipped from below.",
        "clip_ratio/high_mean": "Share of tokens (sequences, if the ratio is theirs) clipped from above.",
        "clip_ratio/region_mean": "Share of tokens (sequences, if the ratio is theirs) clipped from below or above.",
        "cispo_clip_ratio": "Share of tokens with a capped ratio, in place of `clip_ratio/…` (`grpo.loss = cispo`).",
        "sampling/logp_difference": "Mean difference of log-probabilities between sampling and training, over answers "
        "of the present version. Above 1e-3 in float32, the two disagree about the model.",
    },
    "Off-policy": {
        "off_policy/foreign_logp": "Mean log-probability under this node's policy, in nats a token, of other peers' "
        "tokens trained on. Missing if there were none.",
        "off_policy/<whose>/ratio_p1": "Probability in the update over probability at sampling, of the tokens trained "
        "on: the first percentile. `stale` = own answers of an older version, `foreign` = others' whose "
        "log-probabilities came along (their word). Missing if there were none.",
        "off_policy/<whose>/ratio_p50": "The same ratio: the median. Missing without such tokens.",
        "off_policy/<whose>/ratio_p99": "The same ratio: the 99th percentile. Missing without such tokens.",
        "off_policy/<whose>/second_moment": "Mean squared logarithm of the ratio of probability in the update to "
        "probability at sampling. Missing without such tokens.",
        "off_policy/<whose>/ess": "Effective sample size over number of answers, with the products of ratios over each "
        "answer as weights: 1 = on-policy. Missing without such answers.",
    },
    "The swarm": {
        "swarm/peers": "Other members seen now, bootstraps included.",
        "swarm/trainers": "Other members seen now that train.",
        "swarm/bytes_in": "All traffic in, in bytes: a running total.",
        "swarm/bytes_out": "All traffic out, in bytes: a running total.",
        "swarm/groups_own": "Own groups trained on in this round.",
        "swarm/groups_used": "Groups of other peers trained on in this round.",
        "swarm/staleness_mean": "Mean age, in seconds, of the groups of other peers trained on in this round. Missing "
        "if there were none.",
        "swarm/groups_sent": "Groups published: a running total.",
        "swarm/bytes_sent": "Bytes of groups published: a running total.",
        "swarm/unsent/<reason>": "Own groups that were not published, by reason ([reasons]"
        "(../sharing.md#what-is-sent)): a running total.",
        "swarm/groups_received": "Groups of other peers that came, in batches with a right signature: a running total.",
        "swarm/groups_admitted": "Groups of other peers that passed every check: a running total.",
        "swarm/rejected/<reason>": "What did not pass, by reason ([reasons](../sharing.md#what-is-admitted)), and "
        "whatever else of others was refused.",
        "swarm/restarts/<process>": "How often that process of the network (`gossip`, `dht`) was started again, since "
        "it had ended or did not answer; `swarm-node status` says why it ended last.",
        "swarm/payloads": "Groups of other peers of which answers were left out because they carry a payload "
        "([why](../sharing.md#payloads)): a running total. Missing while 0.",
        "swarm/groups_waiting": "Groups of other peers that wait in the pool now.",
        "swarm/bytes_waiting": "Bytes of memory of the groups that wait in the pool now.",
        "swarm/learned_own": "Own groups that this node learned from, having different rewards, in a swarm that gave "
        "it some ([meaning](../sharing.md#what-it-was-worth)): a running total that a resumed run restores.",
        "swarm/learned_others": "Groups of others that this node learned from: a running total that a resumed run "
        "restores. Missing while 0.",
        "swarm/success_by_others_first": "Share of right answers among the first 128 own groups, on the kinds of task "
        "that others taught ([meaning](../sharing.md#what-it-was-worth)). Missing while there are fewer than 256 own "
        "groups, and without such a kind.",
        "swarm/success_by_others": "Share of right answers among the latest 128 own groups, on the kinds of task that "
        "others taught. Missing as the same share among the first.",
        "swarm/success_by_itself_first": "Share of right answers among the first 128 own groups, on the kinds of task "
        "that this node taught itself.",
        "swarm/success_by_itself": "Share of right answers among the latest 128 own groups, on the kinds of task that "
        "this node taught itself. Missing as the same share among the first.",
        "swarm/unsolved_taught": "Questions of which others' right answers were trained on while the latest own "
        "answers to their kind were all wrong: a running total that a resumed run restores. Missing while 0.",
        "swarm/declared_pass_1": "Mean held-out pass@1 of the members that declare it: their word. Missing if none "
        "does.",
        "swarm/declared_used": "Groups of this node that members say they trained on, at least: their word. "
        "Missing if none does.",
        "swarm/declared_share": "Share of this node's groups in what a member trained on of others' groups, mean over "
        "members that say so, at least.",
    },
    "Averaging": {
        "averaging/exchanges": "How often this node averaged: a running total.",
        "averaging/bytes": "Bytes sent for it, also in exchanges that came to nothing.",
        "averaging/partners": "Members of the cohort here now.",
        "averaging/spread": "Root mean square difference to the last partner's weights, before averaging.",
        "averaging/skipped/<reason>": "Exchanges that did not come about, by reason "
        "([reasons](../averaging.md#figures)).",
        "averaging/refused/<reason>": "Calls and answers of others that this node refused, by the same reasons.",
    },
    "Stages": {
        "stages/bytes_per_token": "Bytes sent by the lead to other stages for each token sampled or trained on, "
        "replicas apart, in this round.",
        "stages/bubble": "Share of training that the lead waited, in this round.",
        "stages/lost": "Stages lost: a running total. Missing while 0.",
        "stages/recovered/<way>": "Stages held again, by the way their weights were come by "
        "([ways](../stages.md#when-a-machine-vanishes)).",
        "stages/given_up": "Peers that lived but were of no use, and were given up.",
        "stages/unable": "Stages that a peer was to hold and could not.",
        "stages/stuck": "Times that the crew began anew because nothing moved and nobody knew why.",
        "stages/gave_way": "Times that this node led and followed another lead instead.",
        "stages/late": "Messages of work that was given up meanwhile.",
        "stages/unsent": "Messages that could not be sent, because the channel had closed.",
        "stages/stray": "Records that had no place in what was going on.",
        "stages/refused/<reason>": "Messages and peers refused, by reason.",
    },
    "The machine": {
        "machine/cpu_cores": "Cores in use by all processes of the node, mean over some seconds. Missing in the first "
        "seconds of a start.",
        "machine/cores": "Cores that it may use; a container's quota counts.",
        "machine/memory_bytes": "Main memory of all its processes; a page that they share counts once for each.",
        "machine/disk_bytes": "Size of the run directory, measured once a minute and after each checkpoint.",
        "machine/gpu_bytes": "GPU memory that it holds. Missing without a GPU in use.",
    },
    "Cost": {
        "cost/spent": "`price_per_hour` times the hours that the run has run, resumptions included: a running total. "
        "Pauses before the end of a round count; what comes after the last round of a start (held-out questions, the "
        "hand-over, a pause that ends it) never does, nor the time in which no process ran. Missing without a price.",
        "cost/groups": "Groups admitted to training since there is a price, own (`swarm/groups_own`) and foreign "
        "(`swarm/groups_used`), once for each time that one is trained on: a running total. Missing without a "
        "price.",
        "cost/per_admitted_group": "`cost/spent` / `cost/groups`: spent, for each group admitted to training. Not for "
        "each of `swarm/groups_admitted`, which may wait and never be trained on. Missing while there is none.",
        "cost/per_reward_point": "Spent, for 1.0 of `reward` gained: mean of the last tenth of the rounds less that of "
        "the first (ten rounds each at least, as far as they have a price). Missing unless the gain is more than twice "
        "its standard error.",
    },
}
"""Section -> name -> meaning, in Markdown with links as from a page in docs/reference."""

OF_BOOTSTRAPS = {
    "swarm/messages_in": "Messages of gossip that came.",
    "swarm/messages_out": "Messages of gossip passed on.",
    "swarm/dropped": "Messages dropped because a queue was full.",
    "swarm/connections/<process>": "Connections of that part of the network now.",
    "swarm/loose_ends": "Failures in the network's thread that nobody waited for.",
}
"""Further numbers at /metrics of a bootstrap."""

COUNTERS = frozenset(
    "tasks/scorer_errors swarm/bytes_in swarm/bytes_out swarm/groups_sent swarm/bytes_sent swarm/unsent/<reason> "
    "swarm/groups_received swarm/groups_admitted swarm/rejected/<reason> swarm/payloads stages/lost "
    "stages/recovered/<way> stages/given_up stages/unable stages/stuck stages/gave_way stages/late stages/unsent "
    "stages/stray stages/refused/<reason> averaging/refused/<reason> swarm/messages_in swarm/messages_out "
    "swarm/dropped swarm/restarts/<process> swarm/loose_ends".split()
)
"""Totals that begin at 0 with each process, so they are counters to Prometheus. Totals that a resumed run restores are
not: they fall by the rounds that a crash cost, and Prometheus would take that for a new beginning at 0, and add the
whole total once more."""

LAST_VALUE = COUNTERS | frozenset(
    "round rounds step time num_tokens averaging/exchanges averaging/bytes averaging/skipped/<reason> cost/spent "
    "cost/groups cost/per_admitted_group cost/per_reward_point swarm/unsolved_taught swarm/declared_used "
    "swarm/learned_own swarm/learned_others".split()
)
"""Totals and positions: a line of several rounds has their values at its end. For all other numbers it has means."""

EXPORTED = {
    "time": "round_end_timestamp_seconds",
    "step_time": "step_time_seconds",
    "reward/<task>": "task_reward",
    "rewards/<function>/mean": "function_reward",
    "rewards/<function>/std": "function_reward_std",
    "perf/generated_tok_s": "perf_generated_tokens_per_second",
    "perf/trained_tok_s": "perf_trained_tokens_per_second",
    "swarm/bytes_in": "swarm_receive_bytes",
    "swarm/bytes_out": "swarm_transmit_bytes",
    "swarm/bytes_sent": "swarm_groups_sent_bytes",
    "swarm/bytes_waiting": "swarm_groups_waiting_bytes",
    "swarm/staleness_mean": "swarm_staleness_mean_seconds",
    "averaging/bytes": "averaging_sent_bytes",
}
"""Names at /metrics where that of metrics.jsonl does not follow the conventions of Prometheus: base units, written out,
at the end of the name. https://prometheus.io/docs/practices/naming"""

PREFIX = "swarm_node_"  # of every name at /metrics
_MEANINGS = {name: meaning for section in METRICS.values() for name, meaning in section.items()}


def find_metric(key: str, names: Iterable[str] = _MEANINGS) -> str | None:
    """The one of `names` that describes `key` of a record, or None: `reward/gcd` -> `reward/<task>`."""
    for name in names:
        if re.fullmatch(re.sub(r"<\w+>", "[^ ]+", re.escape(name)), key):
            return name
    return None


def metric_name(name: str) -> str:
    """The name at /metrics, without the `_total` of counters: `swarm/groups_sent` -> `swarm_node_swarm_groups_sent`."""
    return PREFIX + re.sub("[^a-zA-Z0-9_]+", "_", name)


def describe_metric(key: str) -> tuple[str, bool] | None:
    """(meaning without Markdown, whether it is a counter) of `key` at /metrics; None if it is unknown. Other numbers
    have their names there in it."""
    every = _MEANINGS | OF_BOOTSTRAPS
    name = find_metric(key, every)
    if name is None:
        return None
    text = re.sub(r" ?\(\[[^]]*\]\([^)]*\)\)", "", every[name])
    return re.sub("`([^`]*)`", lambda quoted: _at_metrics(quoted[1]), text), name in COUNTERS


def _at_metrics(name: str) -> str:
    """The name at /metrics of a number of a round; any other word as it is."""
    return metric_name(labelled(name)[0]) + "_total" * (name in COUNTERS) if name in _MEANINGS else name


@lru_cache(4096)
def has_last_value(key: str) -> bool:
    """Whether `key` of a record is one of LAST_VALUE."""
    return find_metric(key, LAST_VALUE) is not None


def labelled(key: str) -> tuple[str, dict[str, str]]:
    """The name (without `_total` and what all names begin with) and the labels of `key` at /metrics. What `<…>` stands
    for is a label there: `reward/gcd` -> `task_reward`, {"task": "gcd"}."""
    name = find_metric(key, [*_MEANINGS, *OF_BOOTSTRAPS])
    if name is None:
        return key, {}
    found = re.fullmatch(re.sub(r"<(\w+)>", r"(?P<\1>.+)", re.escape(name)), key)
    return EXPORTED.get(name) or re.sub(r"/<\w+>", "", name), found.groupdict() if found else {}
