"""Configuration of training: model, tasks, rewards, sampling, update rule, evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, PrivateAttr, field_validator, model_validator

from swarm_node.config.section import Plugin, Section
from swarm_protocol.answer_form import AnswerForm, AnswerKind

TEMPLATE_OWN = {"messages", "tools", "documents", "add_generation_prompt"}  # what the node itself gives to a template


class PolicyConfig(Section):
    """The language model that this node trains, and its device."""

    model: str = "starter"
    """Causal language model: a directory, a GGUF file, a Hugging Face hub id, `smollm2` or `starter`. `starter` = the
    tiny model in this package, `smollm2` = SmolLM2-135M-Instruct in 4 bits, which is fetched once."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    lora: bool | None = None
    """Train a LoRA adapter instead of all weights; unset = only above 100 million parameters, or with `quantize`."""
    quantize: Literal["nf4", "int8"] | None = None
    """Keep the model's linear layers in 4 bits (`nf4`) or 8 bits (`int8`) under the adapter; unset = in `dtype`. It
    saves memory, not time, and needs the package bitsandbytes. Weights are averaged among members that do the same."""
    lora_rank: PositiveInt = 16
    """Rank of the adapter."""
    lora_alpha: PositiveInt = 32
    """Scale of the adapter (alpha / rank multiplies its output)."""
    lora_targets: str | list[str] = "all-linear"
    """Modules that get an adapter (PEFT's `target_modules`)."""
    device: str = "auto"
    """Device of torch; `auto` = cuda, else mps, else cpu."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of weights. `auto` = with LoRA bfloat16 on a GPU that has it, on a CPU the one in which a round is
    faster, and kept for the run; float32 where all weights are trained."""
    threads: int = Field(0, ge=0, le=1024)
    """CPU threads for torch; 0 = as many as there are idle cores, and one below 2 million parameters. Idle cores are
    counted again between rounds; a small model gains nothing by a second thread."""
    system_prompt: str = ""
    """System message for tokenizers whose chat template takes one; empty = none. The sentence that asks for the form
    of `rewards.answer` follows it."""
    prompt_template: str = "{question}\n"
    """Prompt for tokenizers without a chat template; `{question}` is replaced."""
    chat_template: str | None = None
    """Name of a chat template, for tokenizers that have several; unset = that called `default`."""
    chat_template_kwargs: dict[str, object] = {}
    """Arguments of the chat template, as {enable_thinking = false}."""

    @property
    def prompt(self) -> list[object]:
        """The values that make a prompt of a question. Checkpoints have them; those of chat templates only if set."""
        templates = self.chat_template, self.chat_template_kwargs
        return [self.system_prompt, self.prompt_template, *filter(None, templates)]

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_arguments(cls, value: dict[str, object]) -> dict[str, object]:
        for name in value:
            if not name.isidentifier() or name in TEMPLATE_OWN:
                raise ValueError(f"{name!r} cannot be an argument: the node gives {', '.join(sorted(TEMPLATE_OWN))}")
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"values are texts, numbers, true or false, lists and tables: {error}") from None
        return value


class TaskConfig(Section):
    """One source of tasks: either an environment (with its options) or a file."""

    env: str | None = None
    """Environment name from `swarm-node tasks`, for example `gcd`."""
    config: dict[str, object] = {}
    """Options of the environment."""
    file: str | None = None
    """File of questions and answers: JSON lines, a JSON array, CSV, TSV or Parquet; or a data set of the Hugging Face
    hub, `hf:OWNER/NAME`, with `/CONFIGURATION`, `:SPLIT` and `@REVISION` where they matter."""
    question: str = "question"
    """Column of the file that has the question. `a.b` is a value inside column `a`; `{a}\\nA) {b.0}` is a template."""
    answer: str = "answer"
    """Column of the file that has the answer."""
    kind: AnswerKind | None = None
    """Kind of the answers in the file; unset = `rewards.kind`."""
    weight: PositiveFloat = 1.0
    """Frequency of this source, relative to the others."""

    @property
    def columns(self) -> tuple[str, str]:
        """The columns of question and answer."""
        return self.question, self.answer


COLUMNS = TaskConfig().columns  # those of question files, unless their user names others


HUB = "hf:"  # begins the name of a data set of the Hugging Face hub
TABLES = (".csv", ".tsv")
QUESTION_FILES = (".jsonl", ".json", ".parquet", *TABLES)


def is_question_file(name: str) -> bool:
    """Whether a name among `tasks` is one of a question file, or of a data set of the hub."""
    return name.startswith(HUB) or name.lower().endswith(QUESTION_FILES)


def is_table(name: str) -> bool:
    """Whether the file of that name is a table with a header and a character between cells."""
    return name.lower().endswith(TABLES)


class RewardFunctionConfig(Section):
    """A reward function that the user wrote: its path, or a table with its path and weight."""

    path: str
    """`file.py:function` or `package.module:function`, with TRL's signature `f(prompts, completions, **columns)`."""
    weight: float = 1.0
    """Factor of its reward in the sum."""
    _given: Callable[..., Any] | None = PrivateAttr(None)

    @property
    def given(self) -> Callable[..., Any] | None:
        """The function itself, if `swarm_node.train` was given it; `path` is then its qualified name."""
        return self._given

    @property
    def name(self) -> str:
        """The function's own name."""
        return self.path.rpartition(":")[2].removesuffix("()").rpartition(".")[2]

    def give(self, function: Callable[..., Any]) -> None:
        """Take this function instead of loading the one at `path`."""
        self._given = function

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, value: object) -> object:
        return {"path": value} if isinstance(value, str) else value


class RewardsConfig(Section):
    """Rewards of completions."""

    partial: bool = False
    """Give partial credit if the task's checker can. Off = 1 for a fully right answer, else 0. In tests partial credit
    was exploited: a long guess that contains a short number earned reward."""
    checker_weight: float = Field(1.0, ge=0)
    """Weight of the task's own checker beside `functions`; 0 = only the functions count."""
    answer: AnswerForm = "any"
    """Form in which an answer counts. `any` = as it is found (docs/tasks.md); `tags` = as `<answer>…</answer>` at the
    end of the text; `boxed` = as `\\boxed{…}` there. Policies are told so. Members go by their swarm's manifest."""
    kind: AnswerKind | None = None
    """Kind of the answers in question files. `number` = the number that an answer ends with, `maths` = an expression of
    the same value, `choice` = a letter or the text beside it, `yes-no`, `text` = the whole text or number; unset =
    guessed from the references of each file, and said at the start. Members go by their swarm's manifest."""
    functions: list[RewardFunctionConfig] = []
    """Python reward functions, for this node only: `file.py:function`, or a table with `path` and `weight`."""


class RolloutsConfig(Section):
    """Sampling of answers."""

    groups: int = Field(0, ge=0)
    """Groups sampled in each round; 0 = 32 for policies below 20 million parameters on one machine, else 8. A member of
    a swarm samples at most so many: `sharing.own`, and more while others' groups are missing (`sharing.fill`)."""
    group_size: int = Field(8, ge=2)
    """Completions sampled for each task (G). At least two, because the baseline is the group's mean."""
    max_new_tokens: PositiveInt = 256
    """Length limit of a completion, in tokens. Unset, a policy of 20 million parameters or more is asked some questions
    first, and takes the least of 32, 64 and 128 at which a third of its answers end, else 256; a run keeps it for the
    same questions and prompt."""
    max_prompt_tokens: PositiveInt = 2048
    """Tasks with longer prompts are skipped and counted."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: keep the smallest set of tokens with this much probability."""
    engine: Literal["auto", "native", "transformers"] | Plugin = "auto"
    """Sampling engine: `native` (fast, common architectures) or `transformers` (any). `auto` = native where it fits.
    Or a plugin `package.module:Class`."""


MomentDecay = Annotated[float, Field(ge=0, lt=1)]


class GrpoConfig(Section):
    """The update rule. Defaults: DAPO's token mean and clip-higher, no KL term."""

    loss: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"] | Plugin = "dapo"
    """Objective, or a plugin `package.module:name`, a function or class; see docs/grpo.md."""
    advantage: Literal["group_std", "batch_std", "none", "leave_one_out", "median", "pass_k"] | Plugin = "group_std"
    """Baseline and scale: (r-mean)/std of the group | (r-mean)/std of the batch | r-mean | leave-one-out mean
    | median and MAD | share in the group's pass@k | a plugin `package.module:function`."""
    k: PositiveInt = 4
    """`pass_k`: answers of which one has to be right. It must be less than `rollouts.group_size`."""
    answers: int | None = Field(None, ge=0)
    """Train on so many answers of each own group: half the best ones, half the worst, ties by chance. 0 = all; unset =
    4 for policies below 20 million parameters on one machine, else all."""
    replay: int = Field(0, ge=0)
    """Own earlier right answers to train on again in each round, beside the new groups; 0 = none. For nodes that train
    alone: in a swarm, the answers of others do the same."""
    aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Order of steps for several rewards: normalise their sum, or normalise each and then sum (GDPO)."""
    epsilon_low: float | None = Field(None, ge=0)
    """Lower clip range; unset = 0.2 (gspo: 3e-4)."""
    epsilon_high: float | None = Field(None, ge=0)
    """Upper clip range; unset = 0.28 (gspo: 4e-4; cispo: 5.0, where it is the cap on the ratio itself)."""
    delta: float | None = Field(None, gt=0)
    """Two-sided clip: also cap the ratio at this value when the advantage is negative."""
    importance_level: Literal["token", "sequence"] | None = None
    """Ratio and clip of each token, or of each sequence (its geometric mean); unset = token (gspo: sequence)."""
    correction: Literal["recorded", "truncated"] | Plugin = "recorded"
    """Denominator of the ratios, and factors on the loss, where another policy sampled. `recorded` = own recorded
    log-probabilities, and ratio 1 for a peer's rollouts. `truncated` = ratio 1, and importance weights as factors: at
    most 2 a token, at most 1 for a peer's, 1 where none were recorded or sent; it needs `rollouts.top_p` = 1. Or a
    plugin `package.module:Class`."""
    off_policy_mask: float | None = None
    """Leave out sequences with a negative advantage that have become unlikely (DeepSeek-V3.2). The limit is the mean
    loss of log-probability per token; 0.5 is a good start."""
    beta: float = Field(0.0, ge=0)
    """Weight of the k3 KL penalty to the reference policy; 0 = no reference policy is kept."""
    iterations: PositiveInt = 1
    """Optimiser updates on each batch of groups."""
    batch_groups: int = Field(8, ge=0)
    """Groups of an optimiser update. A round with more makes several updates of about so many, one after the other.
    0 = one update with all."""
    mask_truncated: bool = False
    """Leave completions that hit the length limit out of the loss (DAPO's overlong filter)."""
    learning_rate: PositiveFloat | None = None
    """Adam's step size; unset = 2e-4 for full training below 20 million parameters, 2e-6 above, 2e-4 for LoRA."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """AdamW with moments in float32 (`adamw`), or in 8 bits (`adamw_8bit`). These take a quarter of the memory, which
    counts where all weights are trained. On a CPU their updates take many times as long. They need the package
    bitsandbytes, and are not for stages."""
    betas: tuple[MomentDecay, MomentDecay] = (0.9, 0.95)
    """Adam's moment decay rates."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    grad_clip: PositiveFloat = 1.0
    """Largest norm of the gradient."""
    warmup: int = Field(0, ge=0)
    """Updates over which the learning rate rises linearly."""
    schedule: Literal["constant", "linear", "cosine"] | None = None
    """How the learning rate falls until the run ends, beside the warm-up; see docs/grpo.md. Unset = `linear` for
    policies of 20 million parameters or more that train alone on one machine, else `constant`."""
    final_rate: float = Field(0.0, ge=0, le=1)
    """`linear`, `cosine`: share of the learning rate that is left at the end."""
    schedule_rounds: PositiveInt | None = None
    """`linear`, `cosine`: rounds over which the rate falls; it stays there. Unset = `rounds`, which a run that goes on
    for longer stretches, and `minutes`, over which it falls anew in each start."""
    microbatch_tokens: PositiveInt = 8192
    """Most tokens (padding included) in one forward pass. Fewer where free memory asks for it; halved when it runs
    out."""
    gradient_checkpointing: Literal["auto", "on", "off"] = "auto"
    """Compute layers again in the backward pass instead of keeping what they computed: half of the memory or less, more
    time. `auto` = where a microbatch would otherwise not hold a group. Crews do not do it."""
    packing: bool = True
    """Pack a group into one row that shares the prompt, where the architecture allows."""


class EvalConfig(Section):
    """Held-out questions, asked before a run, while it trains and after it."""

    questions: int = Field(128, ge=0)
    """Held-out questions, over all tasks; 0 = no held-out figures."""
    before_s: PositiveFloat = 30.0
    """Most seconds that the questions before training take, but a first few are asked in any case. Where fewer than
    `questions` fit in, the run asks only those later on."""
    samples: PositiveInt = 8
    """Samples per question: pass@1 is their mean, pass@k says whether any is right."""
    tasks: list[str | TaskConfig] = []
    """Tasks and files of the evaluation, as in `tasks`; empty = the part of `tasks` that is held out of training. All
    questions of a file are asked, in their order, and a run alone then trains on all questions of its other files."""
    every: int = Field(10, ge=0)
    """Rounds between two evaluations while the run trains; 0 = only before and after it. The best checkpoint by
    held-out pass@1 (mean reward with `rewards.checker_weight` = 0) is then kept beside the newest ones."""
    share: float = Field(0.05, gt=0, le=1)
    """Most of the time that evaluations take while the run trains, in all its starts together: one that would take
    more waits for a later round that is due. The first one waits for at most five times its own time, and the next
    ones make up for that. 1 = no limit."""
