"""Some questions with what was answered, in samples.jsonl: a few groups every few rounds.

A record has one group: its round and time, the task's label, the question and the right answer, and up to MAX_ANSWERS
answers, each with its text, the part of it that was judged, its reward, the reward of each function where there are
several, and the advantage that it was trained with. `prompt` is the text that the model was given, special tokens
included. `peer` is the id of the member that sampled the group; null = this node. Long texts lose their middle. When
the file is full, its newer half stays.

Texts come from models and from strangers: those who show them escape control characters.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from swarm_node.config.machine import MetricsConfig
from swarm_node.errors import UserError
from swarm_node.observability.jsonl import JsonLines, last_lines, record_in, whole_lines
from swarm_node.observability.shown_samples import MAX_ANSWERS, MAX_REWARDS, NAME, TEXT
from swarm_node.say import Once
from swarm_node.types import Group, Rollout

SAMPLES_BYTES = 8 << 20  # most bytes of samples.jsonl
QUESTION_CHARS, ANSWER_CHARS, EXTRACTED_CHARS = TEXT, 1000, NAME  # most characters kept of each text
MOST_COUNTED = 1000  # kinds of groups whose records are counted, before counting begins anew
GAP = " […] "


class SampleLog:
    """Writes samples.jsonl of a run."""

    def __init__(
        self,
        path: Path,
        config: MetricsConfig,
        report: Callable[[str], None],
        prompt_text: Callable[[list[int]], str],
    ) -> None:
        """`report` takes sentences for the user, `prompt_text` decodes a prompt. Raises UserError if the file cannot be
        written."""
        self._prompt_text = prompt_text
        self._file = JsonLines(path, report)
        self._config = config
        self._report = report
        self._report_once = Once(report)
        self._written: Counter[tuple[str, str]] = Counter()  # (peer or "", task) -> number of its records

    def truncate_after(self, round: int) -> None:
        """Drop the records of rounds after `round`, which will be recorded again."""
        try:
            self._file.cut_after(lambda record: record.get("round", 0) <= round)
        except (UserError, TypeError) as error:  # somebody has damaged the file: no reason not to train
            self._report(f"{error}; until then, samples of lost rounds stay in it")

    def due(self, round: int) -> bool:
        """Whether groups of this round are to be recorded: it is the first, or one of the `metrics.samples_every`."""
        every = self._config.samples_every
        return every > 0 and (round == 1 or round % every == 0)

    def write(self, round: int, own: Sequence[Group], trained: Sequence[Group]) -> list[dict[str, Any]]:
        """Record some groups, and return their records. `own` are the groups that this node sampled in the round,
        `trained` those that it trained on, of which those of other peers are eligible."""
        foreign = [group for group in trained if group.peer is not None]
        records = [self._record(round, group) for group in self._chosen(own, foreign)]
        for record in records:
            self._file.append(record)
        self._file.bound(SAMPLES_BYTES)
        return records

    def close(self) -> None:
        """Flush. Raises UserError if the disk had no room."""
        self._file.close()

    def _chosen(self, own: Sequence[Group], foreign: Sequence[Group]) -> list[Group]:
        """In turn a group of this node with right and wrong answers, one of another peer, one of this node without any
        reward, and any other; of these kinds each time one of the task (and peer) that was recorded least."""
        mixed = [group for group in own if len({rollout.reward for rollout in group.rollouts}) > 1]
        failed = [group for group in own if not any(rollout.reward for rollout in group.rollouts)]
        kinds = [mixed, list(foreign), failed, list(own)]
        chosen: list[Group] = []
        if len(self._written) > MOST_COUNTED:
            self._written.clear()
        while len(chosen) < self._config.samples_groups and any(kinds):
            for kind in kinds:
                left = [group for group in kind if not any(group is other for other in chosen)]
                kind[:] = left
                if left and len(chosen) < self._config.samples_groups:
                    group = min(left, key=lambda group: self._written[_kind(group)])
                    self._written[_kind(group)] += 1
                    chosen.append(group)
        return chosen

    def _record(self, round: int, group: Group) -> dict[str, Any]:
        task, rollouts = group.task, group.rollouts
        return {
            "round": round,
            "time": time.time(),
            "task": task.label,
            "peer": group.peer,
            "question": without_middle(task.question, QUESTION_CHARS),
            "prompt": without_middle(self._prompt(group), QUESTION_CHARS),
            "right": None if task.answer is None else without_middle(task.answer, ANSWER_CHARS),
            "reward": sum(rollout.reward for rollout in rollouts) / max(1, len(rollouts)),
            "of": len(rollouts),
            "answers": [_answer(rollout) for rollout in rollouts[:MAX_ANSWERS]],
        }

    def _prompt(self, group: Group) -> str:
        """The text of the prompt; empty, which is reported once, where the tokenizer fails at it."""
        try:
            return self._prompt_text(group.prompt_ids)
        except UserError as error:
            self._report_once("prompt", f"a sample has no prompt: {error}")
            return ""


def read_samples(path: Path, most_bytes: int = SAMPLES_BYTES) -> Iterator[dict[str, Any]]:
    """The records in the last `most_bytes` of samples.jsonl, oldest first; lines that are no such records are left out.
    Raises UserError if the file cannot be read."""
    lines = whole_lines(path) if path.stat().st_size <= most_bytes else last_lines(path, most_bytes)
    for line in lines:
        record = record_in(line)
        if record is not None and isinstance(record.get("answers"), list):
            yield record


def without_middle(text: str, most: int) -> str:
    """`text` without its middle if it has more than `most` characters; the end, where answers are, keeps more."""
    text = text.encode("utf-8", "replace").decode()  # a lone surrogate cannot be written
    if len(text) <= most:
        return text
    first = (most - len(GAP)) // 3
    return text[:first] + GAP + text[len(text) - (most - len(GAP) - first) :]


def _kind(group: Group) -> tuple[str, str]:
    return group.peer or "", group.task.label


def _answer(rollout: Rollout) -> dict[str, Any]:
    several = {"rewards": dict(islice(rollout.rewards.items(), MAX_REWARDS))} if len(rollout.rewards) > 1 else {}
    return {
        "text": without_middle(rollout.transcript, ANSWER_CHARS),
        "extracted": None if rollout.extracted is None else without_middle(rollout.extracted, EXTRACTED_CHARS),
        "reward": rollout.reward,
        "correct": rollout.correct if rollout.checked else None,
        "finished": rollout.finished,
        "advantage": rollout.advantage,
        **several,
    }
