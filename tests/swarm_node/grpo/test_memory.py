"""How a run is made to fit into memory."""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import partial

import msgspec
import pytest
from transformers import LlamaConfig

from swarm_node.config import NodeConfig, PolicyConfig
from swarm_node.errors import UserError
from swarm_node.grpo import memory
from swarm_node.grpo.memory import (
    Estimate,
    Fitting,
    bytes_of_sampling,
    check_plan,
    fit_sampling,
    hardware_of,
    questions_at_once,
    shape_of,
    training_of,
)
from swarm_node.grpo.trainer import Trainer
from swarm_node.policy import oom
from swarm_node.policy.architecture import model_of
from swarm_node.policy.engines import native
from swarm_node.policy.engines.native import Decoder, NativeEngine
from swarm_node.policy.engines.products import Layout
from swarm_node.policy.fitting import SHARE, Hardware, Training, option_that_fits, sentence_of_refusal
from swarm_node.policy.loading import load_policy, prepare
from swarm_node.policy.policy import Policy
from swarm_node.policy.sizes import KNOWN, RUNTIME_BYTES
from swarm_node.rollouts.evaluate import evaluate
from swarm_node.tasks.taskset import load_tasks
from swarm_node.types import Sampling

GIB = 2**30
PROMPT = [5] * 20


@pytest.fixture(scope="module")
def starter() -> Policy:
    return load_policy(PolicyConfig(), NodeConfig().rollouts, lambda sentence: None)


@pytest.fixture
def policy(starter: Policy) -> Policy:
    """The starter as it was loaded."""
    starter.checkpointing, starter.prompts_at_once = None, lambda prompt, n, new: 2**16
    return starter


def settings(**grpo: object) -> NodeConfig:
    rollouts = {"groups": 16, "group_size": 8, "max_new_tokens": 100}
    return NodeConfig.model_validate({"rollouts": rollouts, "grpo": {"answers": 0} | grpo})


def fitting(
    policy: Policy, available: int, config: NodeConfig | None = None, lines: list[str] | None = None
) -> Fitting:
    config = config or settings()
    report = [].append if lines is None else lines.append
    trainer = Trainer(policy, config.grpo, Sampling(config.rollouts.max_new_tokens), report)
    return Fitting(trainer, [PROMPT], config, Hardware("cpu", available))


def needed(policy: Policy, config: NodeConfig | None = None) -> int:
    """Bytes of a round with ample memory."""
    return fitting(policy, 0, config).fit()


def test_with_ample_memory_nothing_is_changed(policy: Policy) -> None:
    for available in (0, 64 * GIB):
        lines: list[str] = []
        each = fitting(policy, available, lines=lines)
        assert each.fit() < 2 * GIB
        assert each.trainer.limit == 8192 and policy.checkpointing is None and not each.mapped and not lines
        assert policy.prompts_at_once(20, 8, 100) >= 16


def test_large_tensors_are_mapped_unless_the_model_is_small(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    in_the_heap = needed(policy)
    monkeypatch.setattr(memory, "SMALL", policy.num_parameters())
    each = fitting(policy, 0)
    assert each.fit() < in_the_heap and each.mapped and each.trainer.maps


def test_less_memory_makes_smaller_microbatches(policy: Policy) -> None:
    most, limits = needed(policy), []
    for share in (1.0, 0.95, 0.9, 0.85):
        each = fitting(policy, int(share * most / SHARE))
        assert each.fit() <= each.machine.room
        limits.append(each.trainer.limit)
        assert each.trainer.limit >= 119, "one answer behind its prompt"
    assert limits == sorted(limits, reverse=True) and limits[0] > limits[-1]


def test_below_a_group_gradients_are_checkpointed(policy: Policy) -> None:
    """First large tensors are mapped one by one, which costs less time."""
    group, seen = 20 + 8 * 99, []
    least = fitting(policy, 0)
    least.mapped = True
    bytes = [least.bytes(least._least)]
    for available in range(int(bytes[0] / SHARE) + 2**20, int(needed(policy) / SHARE), 2**20):
        policy.checkpointing = None
        lines: list[str] = []
        each = fitting(policy, available, lines=lines)
        each.fit()
        seen.append((policy.checkpointing is not None, each.mapped))
        assert each.mapped or each.trainer.limit >= group
        assert policy.checkpointing is None or any("computed twice" in line for line in lines)
    assert sorted(set(seen), reverse=True) == [(True, True), (False, True), (False, False)]
    assert seen == sorted(seen, reverse=True)


@pytest.mark.parametrize(("available", "name"), [(0, "packed"), (64 * GIB, "packed"), (GIB // 2 + 2**27, "own")])
def test_weights_are_packed_if_there_is_room(
    available: int, name: str, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, lines = policy.engine, list[str]()
    assert isinstance(engine, NativeEngine)
    monkeypatch.setattr(engine, "layout", Layout("own", "a copy takes much"))
    monkeypatch.setattr("swarm_node.grpo.memory.layout_of", lambda model: Layout("own", "a copy takes much"))
    monkeypatch.setattr("swarm_node.grpo.memory.packed_layout", lambda model: Layout("packed", "faster"))
    monkeypatch.setattr(Fitting, "_copied", property(lambda self: GIB * (engine.layout.name == "packed")))
    bytes = fitting(policy, available, lines=lines).fit()
    assert engine.layout.name == name and any(f"multiplies with {name} weights" in line for line in lines)
    assert (bytes > GIB) == (name == "packed")


@pytest.mark.parametrize("setting", ["on", "off"])
def test_checkpointing_can_be_chosen(setting: str, policy: Policy) -> None:
    fitting(policy, 64 * GIB, settings(gradient_checkpointing=setting)).fit()
    assert (policy.checkpointing is not None) == (setting == "on")


def test_without_room_for_one_answer_a_run_is_refused(policy: Policy) -> None:
    with pytest.raises(UserError, match=r"starter needs at least 0\.\d GiB, of 0\.5 GiB of memory here: "):
        fitting(policy, RUNTIME_BYTES).fit()


def test_questions_are_sampled_in_turn_if_memory_asks_for_it(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Decoder] = []
    monkeypatch.setattr(native, "Decoder", lambda *given: made.append(Decoder(*given)) or made[-1])
    prompts, sampling = [[5, 6, 7], [8, 9, 10, 11], [5, 9]], Sampling(12)
    together = policy.generate(prompts, 4, sampling, [1, 2, 3])
    asked = []
    policy.prompts_at_once = lambda prompt, n, new: asked.append((prompt, n, new)) or 1
    in_turn = policy.generate(prompts, 4, sampling, [1, 2, 3])
    assert asked == [(4, 4, 12)] and len(made) == 2, "a copy of the weights serves all questions"
    assert [[r.token_ids for r in group] for group in in_turn] == [[r.token_ids for r in group] for group in together]


def test_held_out_questions_keep_to_the_room(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are cut into as many parts as the room asks for, with the same answers, and the estimate counts them."""
    config = NodeConfig.model_validate({"tasks": ["small/gcd"], "rollouts": {"max_new_tokens": 4, "groups": 4}})
    tasks, sizes = load_tasks(config.tasks, config.rewards), []
    prompts = policy.encode_questions([tasks.prompt(task) for task in tasks.held_out(40)])
    decode = policy.engine.decode
    monkeypatch.setattr(policy.engine, "decode", lambda prompts, *a: sizes.append(len(prompts)) or decode(prompts, *a))
    ample = evaluate(policy, tasks, config.rollouts, 40, 2)
    assert sizes == [32, 8]
    sizes.clear()
    each = fitting(policy, 64 * GIB, config)
    each.fit()
    longest = max(map(len, prompts))
    room = bytes_of_sampling(policy, each.shape, 3, longest, 2, 4)
    policy.prompts_at_once = partial(questions_at_once, policy, each.shape, room)
    assert policy.prompts_at_once(longest, 2, 4) == 3
    assert each.asking(prompts, 2, 32) <= each._lasting + room
    policy.prompts_at_once, cut = lambda prompt, n, new: 2**16, policy.prompts_at_once
    assert each.asking(prompts, 2, 32) > each._lasting + room
    policy.prompts_at_once = cut
    parts = evaluate(policy, tasks, config.rollouts, 40, 2)
    assert (
        msgspec.structs.replace(parts, per_token_s=ample.per_token_s) == ample
        and sum(sizes) == 40
        and 3 <= max(sizes) <= 4
    )


def test_the_sentence_of_memory_names_what_it_counts() -> None:
    assert str(Estimate(GIB)).startswith("a round needs at most about 1.00 GiB of memory, the program itself")
    assert str(Estimate(GIB, asks=True)).startswith("rounds and held-out questions need at most about 1.00 GiB")


def test_a_policy_that_is_not_trained_samples_within_memory(policy: Policy) -> None:
    rollouts = settings().rollouts
    fit_sampling(policy, Hardware("cpu", 0), rollouts, 8)
    assert policy.prompts_at_once(20, 8, 100) == 2**16
    questions = []
    for mib in (560, 700, 1400):
        fit_sampling(policy, Hardware("cpu", mib * 2**20), rollouts, 8)
        questions.append(policy.prompts_at_once(20, 8, 100))
    assert 1 == questions[0] < questions[1] < questions[2] < policy.prompts_at_once(20, 8, 10)


@pytest.mark.parametrize(("available", "name"), [(0, "packed"), (2 * GIB, "packed"), (3 * GIB // 2, "own")])
def test_one_question_decides_whether_weights_are_packed(
    available: int, name: str, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, lines = policy.engine, list[str]()
    assert isinstance(engine, NativeEngine)
    monkeypatch.setattr(policy, "report", lines.append)
    monkeypatch.setattr(engine, "layout", Layout("own", "a copy takes much"))
    monkeypatch.setattr("swarm_node.grpo.memory.layout_of", lambda model: Layout("own", "a copy takes much"))
    monkeypatch.setattr("swarm_node.grpo.memory.packed_layout", lambda model: Layout("packed", "faster"))
    monkeypatch.setattr("swarm_node.grpo.memory.copy_of", lambda *given: GIB * (engine.layout.name == "packed"))
    fit_sampling(policy, Hardware("cpu", available), settings().rollouts, 8)
    assert engine.layout.name == name and f"sampling multiplies with {name} weights" in lines[-1]
    assert policy.prompts_at_once(20, 8, 100) >= 8


def test_what_rounds_leave_room_for_decides_in_the_end(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy beside which answers to one question fit is given up where a round does not, with no smaller updates."""
    engine, lines = policy.engine, list[str]()
    assert isinstance(engine, NativeEngine)
    monkeypatch.setattr(policy, "report", lines.append)
    monkeypatch.setattr(engine, "layout", Layout("own", "a copy takes much"))
    monkeypatch.setattr("swarm_node.grpo.memory.layout_of", lambda model: Layout("own", "a copy takes much"))
    monkeypatch.setattr("swarm_node.grpo.memory.packed_layout", lambda model: Layout("packed", "faster"))
    monkeypatch.setattr(Fitting, "_copied", property(lambda self: GIB * (engine.layout.name == "packed")))
    limits = []
    for sampled in (False, True):
        if sampled:
            fit_sampling(policy, Hardware("cpu", 0), settings().rollouts, 8)
            assert engine.layout.name == "packed"
        each = fitting(policy, GIB // 2 + 2**27, lines=lines)
        each.fit()
        limits.append(each.trainer.limit)
        assert engine.layout.name == "own" and "no room beside a round" in lines[-1]
    assert limits[0] == limits[1]


def test_the_plan_is_checked_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    config = NodeConfig()
    check_plan(config, prepare(config.policy))
    monkeypatch.setattr("swarm_node.grpo.memory.free_main_memory", lambda: 1)
    monkeypatch.setattr("swarm_node.grpo.memory.psutil.Process", lambda: _Small())
    with pytest.raises(UserError, match="starter needs at least"):
        load_policy(config.policy, config.rollouts, lambda sentence: None, check=lambda plan: check_plan(config, plan))


class _Small:
    def memory_info(self) -> _Small:
        return self

    rss, shared = 2**20, 0


def test_the_formula_has_the_size_of_the_loaded_policy(policy: Policy) -> None:
    training = training_of(NodeConfig(), prepare(PolicyConfig()))
    shape = training.model.shape(0, training.width)
    mine = shape_of(policy)
    assert (shape.weights, shape.optimiser, shape.trained) == (mine.weights, mine.optimiser, mine.trained)
    assert hardware_of(policy.device).available > hardware_of(policy.device, 2**20).room == 2**20


# --------------------------------------------------------------------- from the config alone

BIG = next(model for model in KNOWN if model.name == "Qwen/Qwen3-4B")


def training(**policy: object) -> Training:
    config = NodeConfig.model_validate({"policy": {"model": BIG.name} | policy, "rollouts": {"max_new_tokens": 1024}})
    lora = config.policy.lora is not False
    return Training(BIG, config, lora, 2 if lora else 4)


@pytest.mark.parametrize(
    ("gib", "settings", "option"),
    [
        (7, {}, "--quantize nf4"),
        (24, {"lora": False}, "--lora"),
        (4.6, {"quantize": "nf4"}, "--set rollouts.max_new_tokens=512"),
        (3, {}, "--model HuggingFaceTB/SmolLM2-360M-Instruct"),
        (0.4, {}, ""),
    ],
)
def test_a_refusal_names_the_setting_that_fits(gib: float, settings: dict[str, object], option: str) -> None:
    asked, machine = training(**settings), Hardware("cuda", int(gib * GIB))
    assert not asked.fits(machine)
    found = option_that_fits(asked, machine)
    assert found == option
    assert (f"it fits with {found}" if found else "take a smaller --model") in sentence_of_refusal(asked, machine)
    assert "Qwen/Qwen3-4B needs at least" in sentence_of_refusal(asked, machine)
    assert shlex.split(found) == found.split()


def test_the_least_limit_is_the_one_that_is_named() -> None:
    assert Hardware("cpu", 8 * GIB, GIB).in_words == "the 1.0 GiB that --max-memory allows"
    assert Hardware("cpu", 8 * GIB, 9 * GIB).in_words == "8.0 GiB of memory"


def test_a_refusal_undoes_what_saves_no_memory() -> None:
    asked = training(lora=False).with_(grpo={"gradient_checkpointing": "off"})
    assert option_that_fits(asked, Hardware("cuda", 24 * GIB)) == "--set grpo.gradient_checkpointing=auto --lora"


def test_all_weights_are_trained_with_smaller_moments_first() -> None:
    machine = Hardware("cuda", 60 * GIB)
    assert option_that_fits(training(lora=False), machine) == "--set grpo.optimizer=adamw_8bit"
    smaller = training(lora=False).with_(grpo={"optimizer": "adamw_8bit"})
    assert smaller.fits(machine) and not training(lora=False).fits(machine)
    assert sentence_of_refusal(training(lora=False), machine).endswith(
        "adamw_8bit, which needs the package bitsandbytes"
    )


def test_a_cpu_is_told_of_smaller_moments_last() -> None:
    """Its updates take longer with them than with anything else."""
    whole = training(lora=False)
    packed = whole.with_(grpo={"optimizer": "adamw_8bit"})
    assert option_that_fits(whole, Hardware("cpu", int(packed.least_bytes(False) / SHARE) + GIB)) == "--lora"
    wide = replace(BIG, parameters=2 * 10**7, layers=1, hidden=64, inner=10**5, vocabulary=400)
    small = replace(training(lora=False, lora_rank=1024), model=wide)  # its adapter takes more than all weights
    machine = Hardware("cpu", 0, small.with_(grpo={"optimizer": "adamw_8bit"}).least_bytes(False))
    assert option_that_fits(small, machine) == "--set grpo.optimizer=adamw_8bit"
    assert sentence_of_refusal(small, machine).endswith("bitsandbytes and makes an update many times as long")


def test_a_cpu_is_told_of_16_bits() -> None:
    wide = Training(BIG, NodeConfig(policy=PolicyConfig(model=BIG.name)), True, 4)
    assert option_that_fits(wide, Hardware("cpu", 14 * GIB)) == "--set policy.dtype=bfloat16"


def test_longer_answers_fit_into_more_memory() -> None:
    lengths = [training().longest(Hardware("cuda", gib * GIB), 32768) for gib in (4, 12, 16, 24, 80)]
    assert lengths == sorted(lengths) and lengths[0] == 0 < lengths[1] < lengths[-1] <= 16384
    assert training().widest(Hardware("cuda", 24 * GIB)) >= 8 and training().widest(Hardware("cuda", GIB)) == 0


def test_a_model_unlike_a_llama_has_a_size() -> None:
    class Bare:
        model_type, hidden_size, vocab_size = "mamba", 32, [100, 90]

        def get_text_config(self) -> Bare:
            return self

    assert model_of("x", 1000, Bare()).shape(0, 4).trained == 1000
    assert model_of("x", 1000, LlamaConfig(num_attention_heads=4)).heads == 4


def test_large_tensors_are_mapped_while_it_learns_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(oom, "_mallopt", lambda parameter, value: told.append(value))
    with pytest.raises(MemoryError), oom.large_tensors_mapped():
        assert told == [2**20]
        raise MemoryError
    assert told[1] == 32 * 2**20, "also where an update fails"
