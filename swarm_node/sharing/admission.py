"""A stranger's group becomes one of this node's own making: its task regenerated, its texts encoded and judged here.

    name -> own task (assigned to that slot?) -> own token ids -> own rewards -> signal?

Nothing the sender says of prompt, truth or reward is read. What is wrong is a `RemoteProtocolError`.
"""

from __future__ import annotations

import msgspec
import numpy as np

from protocol.errors import RemoteProtocolError
from protocol.manifest import Manifest, ManifestLimits
from protocol.messages import RolloutBatch, SharedGroup, SharedRollout
from protocol.topics import slot_key
from swarm_node.policy.policy import Policy
from swarm_node.tasks import TaskSet
from swarm_node.tasks.rewards import has_signal, judge
from swarm_node.tasks.text import prompt_digest
from swarm_node.types import Group, Rollout, Sampling


def check_caps(shared: SharedGroup, limits: ManifestLimits) -> None:
    """Raises `RemoteProtocolError` with reason `cap` for more or longer rollouts than the swarm's manifest allows."""
    if len(shared.rollouts) > limits.max_rollouts:
        raise RemoteProtocolError("cap", f"{len(shared.rollouts)} rollouts")
    longest = max(len(rollout.text) for rollout in shared.rollouts)
    if longest > limits.max_answer_chars:
        raise RemoteProtocolError("cap", f"a text of {longest} characters")
    most = max(len(rollout.token_ids or ()) for rollout in shared.rollouts)
    if most > limits.max_answer_tokens:
        raise RemoteProtocolError("cap", f"an answer of {most} tokens")


class Admission:
    """The checks that cost something, in the order in which they are made."""

    def __init__(self, manifest: Manifest, policy: Policy, sampling: Sampling, tasks: TaskSet) -> None:
        self._swarm = manifest.swarm_id
        self._policy = policy
        self._longest = sampling.max_new_tokens
        self._tasks = tasks

    def rebuild(self, peer: str, batch: RolloutBatch, shared: SharedGroup) -> Group:
        """The group to train on; `shared` has passed `check_caps`. Raises `RemoteProtocolError`: task, assignment,
        prompt, length, text, error or zero."""
        task = self._tasks.assigned(shared.task, slot_key(self._swarm, peer, shared.epoch, shared.slot))
        if prompt_digest(task.question) != shared.prompt:
            raise RemoteProtocolError("prompt", f"{task.name.environment} {task.name.index} is another question here")
        try:
            prompt_ids = self._policy.encode(self._tasks.prompt(task))
            rollouts = self._encode(shared, len(prompt_ids), batch.tokenizer == self._policy.tokenizer_hash)
            prompt = self._policy.tokenizer.decode(prompt_ids, skip_special_tokens=False)
            judge(task, prompt, rollouts, self._tasks.score)
        except RemoteProtocolError:
            raise
        except Exception as error:  # tokenizers and users' reward functions may raise anything at a stranger's text
            raise RemoteProtocolError("error", f"{type(error).__name__}: {error}") from error
        if not has_signal(rollouts):
            raise RemoteProtocolError("zero")
        return Group(
            task=msgspec.structs.replace(task, slot=(shared.epoch, shared.slot)),
            prompt_ids=prompt_ids,
            rollouts=rollouts,
            policy_version=shared.policy_version,
            peer=peer,
            created=batch.created,
        )

    def _encode(self, shared: SharedGroup, prompt: int, same_tokenizer: bool) -> list[Rollout]:
        """The rollouts that this policy could have sampled itself, in its own tokens."""
        room = min(self._longest, self._policy.max_positions - prompt)
        rollouts, impossible = [], 0
        for answer in shared.rollouts:
            rollout = self._as_sampled(answer, room) if same_tokenizer else None
            if rollout is None:
                if self._policy.is_surely_longer(answer.text, room):
                    continue
                ids = self._policy.encode_completion(answer.text, answer.finished)
                if not ids:
                    impossible += 1
                    continue
                rollout = Rollout(ids, [], answer.finished, answer.text)
            if len(rollout.token_ids) <= room:
                rollouts.append(rollout)
        if len(rollouts) < 2:
            n = len(shared.rollouts)
            raise RemoteProtocolError("text" if impossible else "length", f"{len(rollouts)} of {n} rollouts fit")
        return rollouts

    def _as_sampled(self, answer: SharedRollout, room: int) -> Rollout | None:
        """The answer in the tokens that its sender drew, if it sent at most `room` of them and they say the same as
        its text."""
        ids, data = answer.token_ids, answer.logprobs or b""
        if not ids or len(ids) > room or not self._policy.is_completion(ids, answer.text, answer.finished):
            return None
        logprobs = np.frombuffer(data, dtype="<f2") if len(data) == 2 * len(ids) else np.empty(0)
        sound = bool((np.isfinite(logprobs) & (logprobs <= 0)).all())
        return Rollout(ids, logprobs.tolist() if sound else [], answer.finished, answer.text)
