"""The settings of a run on disk. They change with the first round that is trained under others, and never before.

start without a run here       config.toml at once
start with other settings      config.toml with the first round; the earlier file becomes config-0001.toml
checkpoint                     `CHECKPOINT_KEYS` of the settings behind its weights, for eval, merge and export
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from swarm_node.config import NodeConfig
from swarm_node.config.own import GIVEN_ANEW, dump_own, flat, listed, read_own, shown
from swarm_node.errors import UserError
from swarm_node.say import Once, Say, Warned
from swarm_node.storage.rundir import RunDir

CHECKPOINT_KEYS = {"tasks", "policy", "rollouts", "eval"}
"""Settings in a checkpoint. None of them names code, since a checkpoint may come back from a bucket."""
OF_THE_MACHINE = {"policy": {"model", "revision", "device", "threads"}, "eval": {"tasks"}}
"""Keys that no checkpoint holds, by section: a run may move to another machine, where files are elsewhere; a digest
identifies the model."""
KEPT = re.compile(r"config-(\d{4,})\.toml")


class RunSettings:
    """The config.toml of a run that this process holds."""

    def __init__(self, run: RunDir, config: NodeConfig, asked: NodeConfig, say: Say) -> None:
        """`config` has the settings of this start, `asked` those that its user set."""
        self._run = run
        self._config = config
        self._text = dump_own(config, asked)
        self._without = {"tasks"} if config.swarm and "tasks" not in asked.model_fields_set else set()
        self._say = say
        self._before: NodeConfig | None = None  # settings in config.toml, as long as they are not replaced
        self._once = Once(say)
        self.not_used: tuple[str, ...] = ()  # settings, as `key = value`, that `say_unused` found
        self.of_weights = self._for_checkpoints(config)  # settings behind the present weights, for their checkpoint

    def begin(self, trained: bool, checkpoint: Mapping[str, Any] | None = None) -> None:
        """Write config.toml, unless rounds were `trained` under one that exists. Raises UserError. `checkpoint` has the
        settings in the checkpoint from which this start resumed."""
        if trained and checkpoint:
            self.of_weights = dict(checkpoint)
        if not trained or not self._run.exists:
            self._run.write("config.toml", self._text)
            return
        self._before = read_own(self._run.config)
        if not checkpoint:
            self.of_weights = self._for_checkpoints(self._before)

    def announce(self, when: str, schedule: str | None = None) -> None:
        """Say which settings change; `when` names the round. `schedule`: the one in effect, if it is known."""
        self._say_stretched(when, schedule or self._config.grpo.schedule)
        if changed := self._changed():
            words = [f"{key} {shown(key, old)} -> {shown(key, new)}" for key, (old, new) in changed]
            self._say(f"changed: {listed(words)}, {when}; the earlier settings are kept in {self._kept_name()}")

    def say_unused(self) -> None:
        """Say which settings change though no round is left to train; those of evaluations count all the same."""
        changed = [(key, new) for key, (_, new) in self._changed() if not key.startswith("eval.")]
        self.not_used = tuple(f"{key} = {shown(key, new)}" for key, new in changed)
        if changed:
            self._say(Warned(not_used(self.not_used)))

    def _say_stretched(self, when: str, schedule: str | None) -> None:
        """Say that the learning rate jumps where its schedule falls over other rounds than before, or anew."""
        before, now = self._before, self._config
        if before is None or schedule in (None, "constant") or (before.grpo.schedule or schedule) != schedule:
            return
        if now.grpo.schedule_rounds or before.grpo.schedule_rounds:
            return
        if now.minutes:
            over = f"falls anew over the {now.minutes:g} minutes of this start"
        elif now.total_rounds != before.total_rounds:
            by_time = before.minutes and not before.rounds
            earlier = f"{before.minutes:g} minutes" if by_time else f"{before.total_rounds:g}"
            over = f"now falls over {now.total_rounds:g} rounds instead of {earlier}"
        else:
            return
        self._say(
            f"the learning rate jumps {when}: grpo.schedule = {schedule} {over}; grpo.schedule_rounds, set at the "
            "start, prevents that"
        )

    def trained(self) -> None:
        """Record that this start trained a round. A full disk is mentioned once, and tried again after each round."""
        self.of_weights = self._for_checkpoints(self._config)
        if self._before is None:
            return
        try:
            earlier = self._run.config.read_text(encoding="utf-8")
            if earlier != self._text:
                if self._changed():
                    self._run.write(self._kept_name(), earlier)
                self._run.write("config.toml", self._text)
        except (OSError, UserError) as error:
            self._once("disk", f"{self._run.config} has the settings of earlier rounds: {error}")
            return
        self._before = None

    def _for_checkpoints(self, config: NodeConfig) -> dict[str, Any]:
        """Settings for checkpoints; without the tasks if the swarm, not the user, chose them."""
        include = CHECKPOINT_KEYS - self._without
        return config.model_dump(mode="json", include=include, exclude=OF_THE_MACHINE)

    def _changed(self) -> list[tuple[str, tuple[Any, Any]]]:
        if self._before is None:
            return []
        both = (self._before, self._config)
        before, after = (flat(each.model_dump(mode="json", exclude=GIVEN_ANEW)) for each in both)
        return [(key, (before.get(key), after[key])) for key in after if after[key] != before.get(key)]

    def _kept_name(self) -> str:
        """The name of the next file with earlier settings. These files are never removed."""
        numbers = [int(match[1]) for path in self._run.path.iterdir() if (match := KEPT.fullmatch(path.name))]
        return f"config-{max(numbers, default=0) + 1:04}.toml"


def with_kept_choices(config: NodeConfig, run: RunDir) -> NodeConfig:
    """`config` with what an earlier start of this run has measured for the same model, trained in the same way: the
    number format in place of `auto`, and, for the same questions, the length of answers that nobody has set. Raises
    UserError."""
    if not run.exists:
        return config
    before, policy, rollouts = read_own(run.config), config.policy, config.rollouts
    if any(getattr(before.policy, key) != getattr(policy, key) for key in ("model", "revision", "lora", "quantize")):
        return config
    if policy.dtype == "auto":
        policy = policy.model_copy(update={"dtype": before.policy.dtype})
    if _asked(before) == _asked(config) and "max_new_tokens" not in rollouts.model_fields_set:
        rollouts = rollouts.model_copy(update={"max_new_tokens": before.rollouts.max_new_tokens})
    return config.model_copy(update={"policy": policy, "rollouts": rollouts})


def _asked(config: NodeConfig) -> tuple[object, ...]:
    """What a policy is asked, and in which form it is to answer: longer answers to other questions."""
    return config.tasks, config.rewards.answer, config.rewards.kind, config.policy.prompt


def not_used(settings: Sequence[str]) -> str:
    """The sentence about settings for which no round was left."""
    return f"{listed(settings)} {'was' if len(settings) == 1 else 'were'} not used: nothing was left to train"


def as_trained(config: NodeConfig, checkpoint: object) -> NodeConfig:
    """`config` with the settings in a checkpoint. The `tasks` of a member are those that its user chose; empty = all.
    Raises UserError if the settings are of another version."""
    found = checkpoint if isinstance(checkpoint, dict) else {}
    theirs = {key: found[key] for key in CHECKPOINT_KEYS & found.keys()}
    if config.swarm:
        theirs.setdefault("tasks", [])
    for section, keys in OF_THE_MACHINE.items():
        if isinstance(there := theirs.get(section), dict):
            theirs[section] = there | getattr(config, section).model_dump(mode="json", include=keys)
    try:
        read = NodeConfig.model_validate(theirs)
    except ValidationError as error:
        place = ".".join(map(str, error.errors()[0]["loc"]))
        raise UserError(f"the checkpoint has settings that this version does not know: {place}") from None
    return config.model_copy(update={key: getattr(read, key) for key in theirs})
