"""The tasks of a run: drawing them, naming them, judging answers to them.

    specs -> sources (environment with options | file) -> task -> prompt -> completion -> step -> reward

`sources` opens what a spec names.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import random
import re
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, islice, repeat, zip_longest
from math import ceil

from swarm_node.config import RewardsConfig, TaskConfig
from swarm_node.config.plugins import blamed
from swarm_node.errors import UserError
from swarm_node.tasks.base import TaskSource
from swarm_node.tasks.checkers import FULL_MARKS
from swarm_node.tasks.dialogue import Between, Dialogue
from swarm_node.tasks.files import QuestionFile
from swarm_node.tasks.judging.places import extract
from swarm_node.tasks.judging.texts import normalise
from swarm_node.tasks.names import endless, in_metrics
from swarm_node.tasks.one_turn import EVALUATION_SHARE, OneTurn, is_held_out
from swarm_node.tasks.reward_functions import RewardFunction, call_reward, load_reward
from swarm_node.tasks.sources import chooses, make_labels_distinct, open_sources, task_table
from swarm_node.types import Rollout, Score, Task, Turn
from swarm_protocol.answer_form import AnswerKind
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.messages import TaskName
from swarm_protocol.topics import number

LOGGER = logging.getLogger(__name__)
MOST_COUNTED = 100_000  # questions of a source that are counted when a run starts: it takes a second
CHECKER = "checker"  # name of the task's own checker among the rewards
DRAWS = 1000  # tries to find a question of the training split before giving up; four in five are
MISSES = 1000  # indices without a new held-out question after which a source counts as exhausted

END_TOKENS = 16  # of a prompt that are looked at for `<think>`
_OPENED = re.compile(r"<think>\s*\Z")

GOLDEN = (math.sqrt(5) + 1) / 2


class TaskSet:
    """The tasks of a run, from one or more sources, each with a weight. `load_tasks` makes one."""

    def __init__(self, sources: dict[TaskSource, float], rewards: RewardsConfig, whole: bool = False) -> None:
        """`whole`: nothing is trained on, so that all questions of a source with an end are for evaluation."""
        self._sources = list(sources)
        self._whole = whole
        self._trained_whole: set[TaskSource] = set()  # sources of which training draws held-out questions too
        self._weights = list(sources.values())
        self._by_name = {(source.environment, source.config): source for source in sources}
        self._partial = rewards.partial
        self._form = rewards.answer
        self.reward_weights: dict[str, float] = {}  # weight of each reward; the keys of every `Score.rewards`
        if rewards.checker_weight > 0:
            self.reward_weights[CHECKER] = rewards.checker_weight
        self._functions: dict[str, RewardFunction] = {}
        for function in rewards.functions:
            name = function.name
            if name in (CHECKER, *self._functions):
                raise UserError(f"two rewards are called {name!r}: rename the function in {function.path!r}")
            self._functions[name] = load_reward(function)
            self.reward_weights[name] = function.weight
        if not self.reward_weights:
            raise UserError("nothing to reward: rewards.checker_weight is 0 and rewards.functions is empty")
        self._reads_prompts = bool(self._functions)  # whether `score` needs whole prompts: checkers do not
        self.reward_labels = in_metrics(self.reward_weights) if self._functions else {}
        """Reward -> what it is called in metrics, if there are reward functions; not all of a great many."""
        self.scorer_errors: Counter[str] = Counter()
        """Answers, by task label, on which the checker raised; they scored 0."""
        self.function_s: dict[str, float] = defaultdict(float)  # seconds that each reward function has taken so far

    @property
    def labels(self) -> list[str]:
        return [source.label for source in self._sources]

    @property
    def turns(self) -> int:
        """Most answers in one dialogue."""
        return max(source.turns for source in self._sources)

    @property
    def names(self) -> list[str]:
        """Environment, options and generator of each source: equal for equal tasks."""
        return [f"{source.environment} {source.config} {source.generator}" for source in self._sources]

    @property
    def kinds(self) -> dict[str, AnswerKind]:
        """Kind of the answers of each question file, by its label, where that is another than `text`."""
        files = (source for source in self._sources if isinstance(source, QuestionFile))
        return {file.label: file.kind for file in files if file.kind != "text"}

    @property
    def kind(self) -> AnswerKind | None:
        """The kind of the answers in all question files; None if there is no file, or if their kinds differ."""
        kinds = {source.kind for source in self._sources if isinstance(source, QuestionFile)}
        return kinds.pop() if len(kinds) == 1 else None

    @property
    def read_as(self) -> list[str]:
        """A sentence for each question file: what was read as what."""
        files = [source for source in self._sources if isinstance(source, QuestionFile)]
        return [line for source in files for line in (source.was_read, source.is_judged) if line]

    def only(self, specs: Sequence[str | TaskConfig]) -> TaskSet:
        """A set that draws and names only what `specs` choose of this one; it still judges answers to the rest.

        A spec chooses all sources of that set, member, environment (with these options, if it has any) or file.
        UserError if one chooses none.
        """
        chosen: set[int] = set()
        for spec in specs:
            table = task_table(spec)
            found = {i for i, source in enumerate(self._sources) if chooses(table, source)}
            if not found:
                have = ", ".join(self.labels)
                raise UserError(f"task {table.env or table.file!r} is not one of this swarm's, which are {have}")
            chosen |= found
        part = copy.copy(self)
        part._sources = [self._sources[i] for i in sorted(chosen)]
        part._weights = [self._weights[i] for i in sorted(chosen)]
        return part

    def trained_whole_but_for(self, asked: TaskSet) -> TaskSet:
        """This set for a run of its own that is evaluated on `asked`: sources with an end are trained on whole, but for
        those that `asked` has too."""
        part = copy.copy(self)
        part._trained_whole = {
            source
            for source in self._sources
            if source.finite and (source.environment, source.config) not in asked._by_name
        }
        return part

    def sample(self, rng: random.Random, n: int) -> list[Task]:
        """`n` training tasks in random order, shared out among the sources by weight; see `stratify`."""
        counts = stratify(self._weights, n, rng)
        repeated = chain.from_iterable(map(repeat, self._sources, counts))
        tasks = [_draw(source, rng, source in self._trained_whole) for source in repeated]
        rng.shuffle(tasks)
        return tasks

    def at(self, place: float, key: str) -> Task:
        """The training task that `key` seeds in the source at `place` in [0, 1) on the weights laid end to end."""
        ends = list(accumulate(self._weights))
        chosen = min(bisect_right(ends, place * ends[-1]), len(ends) - 1)
        return _seeded(self._sources[chosen], key)

    def assigned(self, name: TaskName, key: str) -> Task:
        """The training task of that name, if it is the one that `key` seeds in its source.

        Raises RemoteProtocolError: `task` if no source of this node makes it, `assignment` if `key` seeds another.
        """
        source = self._by_name.get((name.environment, name.config))
        if source is None:
            raise RemoteProtocolError("task", f"no source for {name.environment} with options {name.config}")
        if name.generator != source.generator:
            raise RemoteProtocolError("task", f"made by {name.generator}, here is {source.generator}")
        task = _seeded(source, key)
        if task.name != name:
            raise RemoteProtocolError("assignment", f"{name.environment} {name.index}, assigned is {task.name.index}")
        return task

    def held_out(self, n: int) -> list[Task]:
        """Up to `n` evaluation questions from the sources in turn; the same at every call."""
        streams = [_each(s) if self._whole and s.finite else _evaluation_tasks(s) for s in self._sources]
        in_turn = chain.from_iterable(zip_longest(*streams))
        return list(islice((task for task in in_turn if task is not None), n))

    def described(self, asked: TaskSet) -> list[str]:
        """Sentences for the start of a run that is evaluated on `asked`: what was read as what, and `split`."""
        return [*dict.fromkeys([*self.read_as, *asked.read_as]), *self.split(asked)]

    def split(self, asked: TaskSet) -> list[str]:
        """For each source with an end that is not too long to count: how many questions train, and how many do not.
        `asked`: the tasks of the evaluation, which may be this set or another."""
        lines = []
        others = None if asked is self else asked._texts()
        for source in self._sources:
            if source.finite and source.size <= MOST_COUNTED:
                texts = [task.question for task in _each(source)]
                held = [] if source in self._trained_whole else [text for text in texts if is_held_out(text)]
                unasked = 0 if others is None else sum(normalise(text) not in others for text in held)
                line = f"{source.label}: {len(texts) - len(held):,} questions trained on"
                if len(held) > unasked or others is None:
                    line += f", {len(held) - unasked:,} held out"
                if unasked:
                    line += f", {unasked:,} neither trained on nor asked: all members of a swarm hold them out"
                lines.append(line)
        return lines

    def _texts(self) -> set[str]:
        """The questions of the sources that have an end."""
        return {normalise(task.question) for source in self._sources if source.finite for task in _each(source)}

    def every(self) -> list[Task]:
        """All questions in their order, one source after the other. UserError if a source has no end."""
        if without_end := [source.label for source in self._sources if not source.finite]:
            raise endless(without_end)
        return [task for source in self._sources for task in _each(source)]

    def overlap(self, training: TaskSet) -> int:
        """The number of this set's questions that `training` may draw, as far as sources of both have an end."""
        return training.drawn_of([task for source in self._sources if source.finite for task in _each(source)])

    def drawn_of(self, asked: Sequence[Task]) -> int:
        """How many of the questions `asked` training may draw from the sources that have an end."""
        drawn = {
            normalise(task.question)
            for source in self._sources
            if source.finite
            for task in _each(source)
            if source in self._trained_whole or not is_held_out(task.question)
        }
        return sum(normalise(task.question) in drawn for task in asked)

    def prompt(self, task: Task) -> str:
        """The question that the task's environment begins with. UserError if it begins with more than that."""
        messages = self._environment(task).reset(task)
        if [message["role"] for message in messages] != ["user"]:
            raise UserError(
                f"task {task.label!r} begins with several messages: policies are asked one question at first"
            )
        return messages[0]["content"]

    def _environment(self, task: Task) -> TaskSource:
        return self._by_name[task.name.environment, task.name.config]

    def prompt_text(self, token_ids: list[int], decode: Callable[[list[int]], str]) -> str:
        """The prompt to give to `score`: all of it if a reward function reads it, else its end, which shows whether it
        begins the reasoning."""
        return decode(token_ids if self._reads_prompts else token_ids[-END_TOKENS:])

    def dialogue(self, task: Task, prompt: str, prompt_ids: list[int], between: Between) -> Dialogue:
        """A dialogue about a task of this set; `prompt`: see `prompt_text`."""
        opened = _OPENED.search(prompt) is not None
        return Dialogue(task, self._environment(task), prompt_ids, between, opened, self._count_error)

    def replay(self, task: Task, prompt: str, texts: Sequence[str]) -> Dialogue:
        """The dialogue in which the policy says these texts, as far as they go."""
        dialogue = self.dialogue(task, prompt, [], lambda text, ended: [])
        for text in texts:
            if not dialogue.over:
                dialogue.answer(Turn([], [], True, text))
        return dialogue

    def score(self, tasks: Sequence[Task], prompts: Sequence[str], completions: Sequence[str]) -> list[Score]:
        """Judge completion i as the only answer to prompt i of task i. UserError if a reward function fails, or if a
        task asks for another answer."""
        dialogues = [
            self.replay(task, prompt, [text]) for task, prompt, text in zip(tasks, prompts, completions, strict=True)
        ]
        if open := [dialogue.task.label for dialogue in dialogues if not dialogue.over]:
            raise UserError(f"task {open[0]!r} asks for another answer")
        return self.judge(dialogues, prompts)

    def judge(self, dialogues: Sequence[Dialogue], prompts: Sequence[str]) -> list[Score]:
        """Scores of dialogues with at least one answer. UserError if a reward function fails."""
        tasks, completions = [each.task for each in dialogues], [each.turns[-1].text for each in dialogues]
        rewards = dict[str, list[float | None]]()
        for name, function in self._functions.items():
            began = time.perf_counter()
            rewards[name] = call_reward(name, function, tasks, prompts, completions)
            self.function_s[name] += time.perf_counter() - began
        checked = [each.reward for each in dialogues]
        if CHECKER in self.reward_weights:
            whole = [value if value is None else float(_is_right(value)) for value in checked]
            rewards[CHECKER] = checked if self._partial else whole
        weights, scores = self.reward_weights, []
        for i, dialogue in enumerate(dialogues):
            mine = {name: column[i] for name, column in rewards.items()}
            total = sum(weights[name] * value for name, value in mine.items() if value is not None)
            found = self._found(dialogue.task, dialogue.said)
            scores.append(Score(found, mine, float(total), _is_right(checked[i]), checked[i] is not None))
        return scores

    def judged(self, dialogues: Sequence[Dialogue], prompt: str) -> list[Rollout]:
        """The scored rollouts of dialogues about one task."""
        rollouts = [dialogue.rollout for dialogue in dialogues]
        scores = self.judge(dialogues, [prompt] * len(dialogues))
        for rollout, score in zip(rollouts, scores, strict=True):
            rollout.extracted, rollout.rewards = score.extracted, score.rewards
            rollout.reward, rollout.correct, rollout.checked = score.reward, score.correct, score.checked
        return rollouts

    def _found(self, task: Task, completion: str) -> str | None:
        """The answer in a completion."""
        environment = self._environment(task)
        if isinstance(environment, OneTurn):
            return environment.found(task, completion)
        return extract(completion, self._form)

    def _count_error(self, task: Task, error: Exception) -> None:
        """An environment failed at an answer, which scores 0."""
        own = None if self.scorer_errors[task.label] else blamed(error)
        if own is not None:
            LOGGER.info("task %r: %s; such answers score 0", task.label, own)
        self.scorer_errors[task.label] += 1


def load_tasks(
    specs: Sequence[str | TaskConfig],
    rewards: RewardsConfig,
    asked: TaskSet | None = None,
    whole: bool = False,
    answers: bool = True,
) -> TaskSet:
    """Tasks of environments, sets (`small`), their members (`small/gcd`), JSONL files and tables with options.

    A source that is named twice counts once, with both weights. `asked`: see `TaskSet.trained_whole_but_for`; `whole`:
    see `TaskSet`. Unless `answers`, a file may lack them in any case. UserError if a source cannot be used.
    """
    if not specs:
        raise UserError("no tasks: name at least one, for example `small`")
    answer_needed = answers and (rewards.checker_weight > 0 or not rewards.functions)
    weights: dict[tuple[str, str], float] = defaultdict(float)
    sources: dict[tuple[str, str], TaskSource] = {}
    for spec in specs:
        table = task_table(spec)
        for source in open_sources(table, answer_needed, rewards.kind):
            key = source.environment, source.config
            source.form = rewards.answer
            sources.setdefault(key, source)
            weights[key] += table.weight
    make_labels_distinct(list(sources.values()))
    found = TaskSet({source: weights[key] for key, source in sources.items()}, rewards, whole)
    if asked is not None:
        found = found.trained_whole_but_for(asked)
    if not whole:
        found.sample(random.Random(0), len(sources))  # raises now, rather than in the middle of a run
    return found


def slot_key(swarm: str, peer: str, epoch: int, slot: int) -> str:
    """Seed of the task to which a peer may publish answers in that slot, as text."""
    return hashlib.sha256(f"task/{swarm}/{peer}/{epoch}/{slot}".encode()).hexdigest()


def slot_place(swarm: str, peer: str, epoch: int, slot: int) -> float:
    """The source of the task in that slot, as a point in [0, 1) on the sources' weights laid end to end.

    frac(hash("place" | swarm | peer | epoch) / 2^64 + slot / golden ratio): the slots of one epoch follow the
    golden-ratio sequence, so any run of slots covers the sources evenly.
    """
    return (number("place", swarm, peer, str(epoch)) / 2**64 + slot / GOLDEN) % 1.0


def _draw(source: TaskSource, rng: random.Random, whole: bool = False) -> Task:
    """A question of the training split; of all questions, if the source is trained on `whole`."""
    for _ in range(DRAWS):
        task = source.task(rng.randrange(source.size))
        if task is not None and (whole or not is_held_out(task.question)):
            return task
    raise _none_to_train(source)


def _none_to_train(source: TaskSource) -> UserError:
    """The error about a source whose questions are all for evaluation."""
    if not source.finite:
        return UserError(
            f"task {source.label!r} has no training question in {DRAWS} draws: all that its options allow are "
            "unusable or belong to the evaluation split; widen the options"
        )
    different = {normalise(task.question) for task in islice(_each(source), MOST_COUNTED)}
    if len(different) == 1:
        has = "one question only"
    elif all(map(is_held_out, different)):
        has = f"{len(different)} different questions"
    else:  # a long file of few
        has = f"hardly any training question, none in {DRAWS} draws"
    return UserError(
        f"task {source.label!r} has {has}, and one question in {EVALUATION_SHARE} (by a hash of its text) is held out "
        "of training, here all of them: add questions, from about 20 different ones on some are trained on and some "
        "held out; or name a file of other questions for the evaluation, --set 'eval.tasks=[\"test.jsonl\"]', and all "
        "of this one are trained on"
    )


def _seeded(source: TaskSource, key: str) -> Task:
    """The training task that `key` seeds in `source`, whatever other sources a node has."""
    return _draw(source, random.Random(f"{key}/{source.environment}/{source.config}"))


def _each(source: TaskSource) -> Iterator[Task]:
    """Every task of a source that has an end."""
    return (task for index in range(source.size) if (task := source.task(index)) is not None)


def _evaluation_tasks(source: TaskSource) -> Iterator[Task]:
    """The different questions of a source that belong to evaluation."""
    seen: set[str] = set()
    misses = 0
    for index in range(source.size):
        task = source.task(index)
        if task is not None and is_held_out(task.question) and normalise(task.question) not in seen:
            seen.add(normalise(task.question))
            misses = 0
            yield task
        elif (misses := misses + 1) >= MISSES:
            return


def stratify(weights: Sequence[float], n: int, rng: random.Random) -> list[int]:
    """How many of `n` draws each source gets: n w_i / sum(w) on average, with less noise than independent draws.

    With n >= sources, each gets one for certain, and the rest follows the excess e_i = max(0, n w_i / sum(w) - 1).
    Fractions are settled by systematic sampling: the shares are laid end to end in random order and cut by a comb with
    teeth at u, u + 1, u + 2, …, u uniform in [0, 1).
    """
    least = 1 if n >= len(weights) else 0
    total = sum(weights)
    excess = [max(0.0, n * weight / total - least) for weight in weights]
    spare = n - least * len(weights)
    scale = spare / sum(excess) if spare else 0.0
    order = list(range(len(weights)))
    rng.shuffle(order)
    offset, reached, teeth = rng.random(), 0.0, 0
    counts = [least] * len(weights)
    for i in order:
        reached += excess[i] * scale
        upto = spare if i == order[-1] else min(spare, ceil(reached - offset))
        counts[i] += upto - teeth
        teeth = upto
    return counts


def _is_right(checked: float | None) -> bool:
    """Whether the checker gave full marks."""
    return checked is not None and checked >= FULL_MARKS


def has_signal(rollouts: Sequence[Rollout]) -> bool:
    """Whether any reward differs: without that every advantage is zero."""
    return len({(r.reward, *r.rewards.items()) for r in rollouts}) > 1
