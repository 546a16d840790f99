"""A policy in stages gives the updates and samples of the policy, also after stages died."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, cycle

import pytest
import torch
from msgspec import structs

from swarm_node.config import GrpoConfig
from swarm_node.errors import Unworkable
from swarm_node.grpo.batch import Row, flatten, plan, token_batch
from swarm_node.grpo.trainer import Trainer
from swarm_node.pipeline import driver
from swarm_node.pipeline.compute import tied_weights
from swarm_node.pipeline.compute.schedule import route
from swarm_node.pipeline.compute.worker import Worker, attend
from swarm_node.pipeline.driver import impossible
from swarm_node.pipeline.messages import LEADER, StageLost, StageMessage
from swarm_node.pipeline.staged_policy import StagedPolicy
from swarm_node.policy.policy import Policy
from swarm_node.types import Sampling
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.pipeline import (
    Apply,
    Backward,
    Forward,
    GradientNorm,
    LossGradient,
    Prefill,
    decode_envelope,
    encode_envelope,
)
from tests.support.pipeline_crew import (
    RATE,
    SAMPLING,
    SIZES,
    Crew,
    Fault,
    Saved,
    parameters,
    saver,
    some_groups,
    whole,
)

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return saver(tmp_path_factory)


def train(policy: Policy, grpo: GrpoConfig, steps: int = 3) -> list[dict[str, float]]:
    if grpo.beta:
        policy.keep_reference()
    trainer = Trainer(policy, grpo, SAMPLING, lambda line: None)
    return [trainer.step(some_groups(10 * i)) for i in range(steps)]


def grpo(**options: object) -> GrpoConfig:
    return GrpoConfig(**{"learning_rate": RATE, "microbatch_tokens": 24, "grad_clip": 0.5} | options)


def same(crew: Crew, policy: Policy, atol: float = 1e-5) -> None:
    expected = {name: p.detach() for name, p in policy.model.named_parameters() if p.requires_grad}
    found = parameters(crew)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=atol, rtol=0, msg=name)


@pytest.mark.parametrize(
    ("stages", "kind", "lora", "beta"),
    [
        (1, "llama", False, 0.0),
        (2, "llama_tied", False, 0.0),
        (3, "llama_tied", False, 0.05),
        (4, "gpt_neox", False, 0.0),
        (3, "qwen2", True, 0.05),
        pytest.param(4, "llama", False, 0.05, marks=pytest.mark.long),
        pytest.param(2, "llama_tied", True, 0.0, marks=pytest.mark.long),
        pytest.param(4, "gpt_neox", True, 0.05, marks=pytest.mark.long),
    ],
)
def test_a_staged_update_is_the_update(stages: int, kind: str, lora: bool, beta: float, saved: Saved) -> None:
    config = saved(kind, lora)
    options = grpo(beta=beta)
    policy = whole(config)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters() if p.requires_grad}
    expected = train(policy, options)
    crew = Crew(config, stages, options, seed=stages)
    crew.policy.packing = policy.packing
    crew.trainer.packing = policy.packing
    for i, metrics in enumerate(expected):
        found = crew.trainer.step(some_groups(10 * i))
        for name in metrics.keys() - {"perf/trained_tok_s"}:
            assert found[name] == pytest.approx(metrics[name], abs=1e-5, rel=1e-4), name
    same(crew, policy)
    assert max((p - before[name]).abs().max() for name, p in parameters(crew).items()) > 1e-3
    assert not crew.refused and crew.policy.version == 3


def test_a_peer_with_several_stages(saved: Saved) -> None:
    """The leader has both ends of a tied policy, another peer the stages between."""
    config, options = saved("llama_tied"), grpo()
    policy = whole(config)
    train(policy, options, 2)
    crew = Crew(config, 4, options, holders={3: 0, 2: 1})
    for i in range(2):
        crew.trainer.step(some_groups(10 * i))
    same(crew, policy)


class Swapped(Policy):
    """A policy whose layers change places for odd microbatches, in one process."""

    spans: list[tuple[int, int]]

    def _passes(self, batches, *options):  # type: ignore[no-untyped-def]
        decoders = [model.get_decoder() for model in (self.base, self._reference)]
        usual = [decoder.layers for decoder in decoders]
        for i, batch in enumerate(batches):
            order = [v.stage for v in route(len(self.spans), i, swapped=True) if v.layers]
            for decoder, layers in zip(decoders, usual, strict=True):
                decoder.layers = torch.nn.ModuleList([layers[j] for k in order for j in range(*self.spans[k])])
            yield from super()._passes([batch], *options)
        for decoder, layers in zip(decoders, usual, strict=True):
            decoder.layers = layers


@pytest.mark.parametrize("stages", [3, *(pytest.param(stages, marks=pytest.mark.long) for stages in (2, 4))])
def test_odd_microbatches_take_the_swapped_route(stages: int, saved: Saved) -> None:
    config, options = saved("llama_tied"), grpo(beta=0.05, microbatch_tokens=12, packing=False)
    crew = Crew(config, stages, options, seed=stages, swapped=True)
    policy = whole(config)
    policy.__class__ = Swapped
    policy.microbatches = crew.trainer.policy.microbatches  # which are odd is to be the same
    policy.spans = [(w.stage.span.first, w.stage.span.end) for w in crew.workers.values()]
    train(policy, options, 2)
    for i in range(2):
        crew.trainer.step(some_groups(10 * i))
    same(crew, policy)
    plain = whole(config)
    train(plain, options, 2)
    with pytest.raises(AssertionError):
        same(crew, plain)


# --------------------------------------------------------------------- what can go wrong

FAULTS = {
    "forward": Fault(1, "Forward", 2),
    "reference": Fault(2, "Forward", 1),
    "backward": Fault(1, "Backward", 1),
    "loss": Fault(2, "LossGradient", 1),
    "before squares": Fault(1, "GradientNormRequest", 0),
    "between squares and apply": Fault(2, "GradientNorm", 2, to=LEADER),
    "after apply": Fault(1, "StageStatus", 2, to=LEADER),
    "in a later step": Fault(1, "Backward", 7),
    "without a word": Fault(1, "Forward", 3, mute=True),
}


SMALL = grpo(beta=0.05, microbatch_tokens=12, packing=False)
"""Options that give many microbatches."""


@pytest.fixture(scope="module")
def undisturbed(saved: Saved) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Metrics of two steps of a crew without losses, and its parameters after them."""
    crew = Crew(saved("llama"), 3, SMALL, seed=1)
    return [crew.trainer.step(some_groups(10 * i)) for i in range(2)], parameters(crew)


RARE = "reference", "loss", "before squares", "in a later step"
"""Faults that take the same path as others."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) if n in RARE else n for n in FAULTS])
def test_a_dead_stage_is_replaced_and_steps_repeated(
    name: str, saved: Saved, undisturbed: tuple[list[dict[str, float]], dict[str, torch.Tensor]]
) -> None:
    fault = replace(FAULTS[name])
    crew = Crew(saved("llama"), 3, SMALL, seed=1, faults=[fault])
    (metrics, weights), asked = undisturbed, []
    for i, expected in enumerate(metrics):
        found = crew.trainer.step(some_groups(10 * i), lambda: asked.append(crew.policy.version))
        if name != "after apply":  # then only the numbers of the repeated pass are those of newer weights
            assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert fault.fired and crew.repairs == 1 and asked == [0, 1]
    for parameter, value in parameters(crew).items():
        torch.testing.assert_close(value, weights[parameter], atol=1e-6, rtol=0, msg=parameter)
    assert [w.updates for w in crew.workers.values()] == [w.optimizer.updates for w in crew.workers.values()] == [2] * 3
    assert crew.refused.keys() <= {"plan"}


def test_a_crew_with_new_stages_keeps_its_count(saved: Saved) -> None:
    crew = Crew(saved("llama"), 3, grpo(), seed=2)
    crew.workers[1].updates = 82
    crew.driver.agree(80)
    assert crew.driver.updates == 80
    crew.trainer.step(some_groups())
    assert [worker.updates for worker in crew.workers.values()] == [81, 81, 81] and crew.driver.updates == 81


@pytest.mark.parametrize("stage", [1, 2], ids=["middle", "end"])
def test_a_stage_dying_before_applying_misses_the_update(stage: int, saved: Saved) -> None:
    fault = Fault(stage, "Apply", 0)
    config, options = saved("llama_tied"), grpo()
    undisturbed, crew = (Crew(config, 3, options, seed=2, faults=faults) for faults in ([], [fault]))
    start = {name: p.clone() for name, p in parameters(crew).items()}
    for c in (undisturbed, crew):
        c.trainer.step(some_groups())
    assert fault.fired and crew.repairs == 1 and crew.policy.version == 1
    assert [w.updates for w in crew.workers.values()] == [1, 1, 1]
    assert [w.optimizer.updates for w in crew.workers.values()] == [int(k != stage) for k in range(3)]  # nobody twice
    expected, found = parameters(undisturbed), parameters(crew)  # the latter compares the matrix at both ends
    own = crew.workers[stage].stage.named().keys() - {crew.workers[0].stage.shared}
    for name, value in found.items():
        if name in own:
            assert torch.equal(value, start[name])
        else:
            torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=0, msg=name)
    crew.trainer.step(some_groups(20))
    parameters(crew)


@pytest.mark.parametrize("stage", [1, 2], ids=["middle", "end"])
def test_a_stage_whose_apply_was_lost_still_updates(stage: int, saved: Saved) -> None:
    """A channel between two peers broke and lost the plan's messages; both peers are still there."""
    config, options = saved("llama_tied"), grpo()
    undisturbed, crew = (Crew(config, 3, options, seed=2) for _ in range(2))
    send, receive, lost = crew.send, crew.receive, []

    def losing(message: StageMessage) -> None:
        if isinstance(message.head, Apply) and message.stage == stage and crew.policy.version == 1 and not lost:
            lost.append(message)
        else:
            send(message)

    def interrupted(timeout: float) -> StageMessage | None:
        if len(lost) == 1:
            lost.append(None)
            raise StageLost((), "a channel broke")
        return receive(timeout)

    def mend(interruption: StageLost) -> None:
        crew.plan += 1
        crew.queues.clear()

    crew.send, crew.receive, crew.driver.on_lost = losing, interrupted, mend
    for c in (undisturbed, crew):
        for i in range(2):
            c.trainer.step(some_groups(10 * i))
    assert len(lost) == 2
    expected = parameters(undisturbed)
    for name, value in parameters(crew).items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=0, msg=name)
    assert [w.updates for w in crew.workers.values()] == [w.optimizer.updates for w in crew.workers.values()] == [2] * 3
    name = crew.workers[0].stage.shared
    for worker in (crew.workers[0], crew.workers[2]):  # the matrix keeps its moments
        assert worker.optimizer.state_dict()[f"step.{name}"] == 2


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tied matrix takes six messages."""
    monkeypatch.setattr(tied_weights, "BLOCK_BYTES", 1)
    assert tied_weights.rows_of(6, SIZES["vocab_size"], SIZES["hidden_size"]) == slice(384, 384)


def test_a_large_tied_matrix_travels_in_blocks(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    for codec in ("float32", "bfloat16", "int8"):
        crews = [Crew(saved("llama_tied"), 3, grpo(), codec=codec, seed=7) for _ in range(2)]
        for block_bytes, crew in zip((2**24, 1), crews, strict=True):
            monkeypatch.setattr(tied_weights, "BLOCK_BYTES", block_bytes)
            crew.trainer.step(some_groups())
            crew.driver.join_ends(averaged=True)
            crew.trainer.step(some_groups(10))
        expected, found = (parameters(crew) for crew in crews)
        assert all(torch.equal(value, expected[name]) for name, value in found.items())
        assert [crew.seen[0, "TiedGradient"] for crew in crews] == [2, 12]
        assert [crew.seen[2, "TiedMatrix"] for crew in crews] == [1, 6]
        assert not crews[1].refused


@pytest.mark.parametrize(
    "fault",
    [
        Fault(2, "TiedGradient", 3),
        pytest.param(Fault(1, "TiedGradient", 2, to=0), marks=pytest.mark.long),
        pytest.param(Fault(2, "TiedGradient", 4, mute=True), marks=pytest.mark.long),
    ],
    ids=str,
)
@pytest.mark.usefixtures("small_blocks")
def test_a_stage_may_die_between_gradient_blocks(fault: Fault, saved: Saved) -> None:
    config, options, fault = saved("llama_tied"), grpo(), replace(fault)
    undisturbed, crew = (Crew(config, 3, options, seed=8, faults=faults) for faults in ([], [fault]))
    for c in (undisturbed, crew):
        for i in range(2):
            c.trainer.step(some_groups(10 * i))
    assert fault.fired and crew.repairs == 1
    expected = parameters(undisturbed)
    for name, value in parameters(crew).items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=0, msg=name)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "fault", [Fault(2, "TiedMatrix", 3), Fault(1, "TiedMatrix", 8, to=2), Fault(1, "Share", 3, to=0)], ids=str
)
def test_a_stage_may_die_between_matrix_blocks(fault: Fault, saved: Saved) -> None:
    """The last stage has just been rebuilt, and is given the matrix."""
    faults = [Fault(2, "Apply", 0), replace(fault)]
    crew = Crew(saved("llama_tied"), 3, grpo(), seed=9, faults=faults)
    crew.trainer.step(some_groups())
    assert all(fault.fired for fault in faults) and crew.repairs == 2
    parameters(crew)  # both ends have it alike
    assert crew.workers[2].optimizer.updates == 0 and [w.updates for w in crew.workers.values()] == [1, 1, 1]
    crew.trainer.step(some_groups(10))
    parameters(crew)


@pytest.mark.parametrize(("kind", "stage"), [("llama", 1), ("llama_tied", 2)], ids=["middle", "end"])
def test_a_stage_made_of_neighbours_takes_longer_steps(stage: int, kind: str, saved: Saved) -> None:
    fault = Fault(stage, "GradientNormRequest", 2)
    crew = Crew(saved(kind), 3, grpo(weight_decay=0.0), seed=10, faults=[fault], fresh=1.1)
    for i in range(2):
        crew.trainer.step(some_groups(10 * i))
    before = {name: p.clone() for name, p in parameters(crew).items()}
    crew.trainer.step(some_groups(20))
    assert fault.fired and crew.repairs == 1
    shared = crew.workers[0].stage.shared
    assert (shared is not None) == (kind == "llama_tied")
    moved = {name: float((p - before[name]).abs().max()) for name, p in parameters(crew).items()}
    own = crew.workers[stage].stage.named().keys() - {shared}
    for name in own:  # the first step of Adam is as long as its rate
        assert moved[name] == pytest.approx(1.1 * RATE, rel=1e-2), name
    if shared is not None and stage == 2:
        assert moved[shared] == pytest.approx(RATE, rel=1e-2)
    assert crew.workers[stage].omega > 0.0 == crew.workers[stage].optimizer.updates - 3
    for i in range(3):
        crew.trainer.step(some_groups(30 + 10 * i))
    parameters(crew)  # both ends still have the matrix alike


@pytest.mark.parametrize(("stages", "lora_layers"), [(3, "[0]"), (5, "[34]")])
def test_stages_without_a_part_of_the_adapter(stages: int, lora_layers: str, saved: Saved) -> None:
    config = saved("llama", lora=True)
    config = config.model_copy(update={"lora_targets": rf".*layers\.{lora_layers}\.self_attn\.[qv]_proj"})
    options = grpo(beta=0.05)
    policy = whole(config)
    expected = train(policy, options)
    fault = Fault(1, "GradientNormRequest", 1)
    crew = Crew(config, stages, options, seed=stages, faults=[fault])
    assert not all(worker.stage.named() for worker in crew.workers.values())
    for i, metrics in enumerate(expected):
        found = crew.trainer.step(some_groups(10 * i))
        assert found["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-4)
    assert fault.fired and not crew.refused.keys() - {"plan"}
    same(crew, policy)


@pytest.mark.parametrize(
    "fault", [Fault(1, "Prefill", 1), Fault(2, "Step", 7), Fault(1, "Step", 3, mute=True)], ids=str
)
def test_a_stage_that_dies_in_mid_generation(fault: Fault, saved: Saved) -> None:
    config, fault = saved("llama"), replace(fault)
    crew = Crew(config, 3, seed=3, faults=[fault])
    assert_equal_samples(crew, whole(config))
    assert fault.fired and crew.repairs == 1


def test_a_stage_may_die_while_another_is_mended(saved: Saved) -> None:
    config, options = saved("llama"), grpo()
    faults = [Fault(1, "Backward", 0), Fault(2, "Reset", 0), Fault(1, "Forward", 4)]
    undisturbed, crew = (Crew(config, 3, options, seed=4, faults=f) for f in ([], faults))
    for c in (undisturbed, crew):
        c.trainer.step(some_groups())
    assert all(fault.fired for fault in faults) and crew.repairs == 3
    expected = parameters(undisturbed)
    for name, value in parameters(crew).items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=0, msg=name)


def nan(head: bytes, body: bytearray) -> tuple[bytes, bytearray]:
    body[:4] = b"\xff\xff\xff\x7f"
    return head, body


def wide(head: bytes, body: bytearray) -> tuple[bytes, bytearray]:
    envelope = decode_envelope(head)
    first = envelope.parts[0]
    wider = structs.replace(first, shape=(*first.shape[:-1], first.shape[-1] + 1))
    return encode_envelope(structs.replace(envelope, parts=(wider, *envelope.parts[1:]))), body


@pytest.mark.parametrize(
    ("kind", "spoil", "reason"),
    [
        (Forward, nan, "nonfinite"),
        (Backward, wide, "shape"),
        (LossGradient, wide, "shape"),
        pytest.param(Forward, wide, "shape", marks=pytest.mark.long),
        pytest.param(Backward, nan, "nonfinite", marks=pytest.mark.long),
        pytest.param(LossGradient, nan, "nonfinite", marks=pytest.mark.long),
    ],
)
def test_a_step_with_a_malformed_message_is_repeated(
    spoil: Callable[[bytes, bytearray], tuple[bytes, bytearray]], reason: str, kind: type, saved: Saved
) -> None:
    config, options = saved("llama"), grpo()
    undisturbed, crew = (Crew(config, 3, options, seed=5) for _ in range(2))
    spoilt = []

    def tamper(head: bytes, body: bytearray) -> tuple[bytes, bytearray]:
        if spoilt or not isinstance(decode_envelope(head).head, kind):
            return head, body
        spoilt.append(kind)
        return spoil(head, body)

    crew.tamper = tamper
    for c in (undisturbed, crew):
        c.trainer.step(some_groups())
    if (spoil, kind) == (wide, LossGradient):
        reason = "size"  # any number of tokens would do, but not with this body
    from_lead = kind is not Backward  # others' messages that are refused are waited for, then missed
    assert spoilt and crew.refused[reason] == 1 and crew.repairs == (not from_lead)
    expected = parameters(undisturbed)
    for name, value in parameters(crew).items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize("stage", [1, *(pytest.param(stage, marks=pytest.mark.long) for stage in (0, 2))])
def test_rollouts_a_stage_keeps_refusing_are_dropped(stage: int, saved: Saved) -> None:
    options, said = grpo(beta=0.05), []
    undisturbed, crew = (Crew(saved("llama"), 3, options, seed=5) for _ in range(2))
    crew.trainer.report = said.append
    handle = crew.workers[stage].handle

    def refuse(message: StageMessage) -> list[StageMessage]:
        if isinstance(message.head, Forward) and not message.head.reference:
            raise RemoteProtocolError("shape", "too long")
        return handle(message)

    crew.workers[stage].handle = refuse
    asked = []
    metrics = crew.trainer.step(some_groups(), lambda: asked.append(1))
    assert metrics["grad_norm"] == 0.0 and crew.policy.version == 0 and asked == [1] and crew.repairs == 0
    assert said == [f"stage {stage} refuses what it is sent, 3 times: no update is made of these rollouts"]
    assert crew.trainer.mean_nll(some_groups()) is None
    crew.workers[stage].handle = handle
    for c in (undisturbed, crew):
        c.trainer.step(some_groups(10))
    expected = parameters(undisturbed)
    for name, value in parameters(crew).items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=0, msg=name)


def test_rows_are_as_long_as_the_stages_take(saved: Saved) -> None:
    config = saved("llama")
    crew = Crew(config, 2)
    found = [
        StagedPolicy(crew.driver, crew.policy.tokenizer, config, print, longest).max_positions
        for longest in (40, 10**6)
    ]
    assert found == [40, SIZES["max_position_embeddings"]] == [40, crew.policy.max_positions]


def test_samples_the_leader_keeps_refusing_are_dropped(saved: Saved) -> None:
    """No other peer is at fault."""
    crew = Crew(saved("llama"), 3, holders={1: 0, 2: 0})
    handle = crew.workers[1].handle

    def refuse(message: StageMessage) -> list[StageMessage]:
        if isinstance(message.head, Prefill):
            raise RemoteProtocolError("shape", "too long")
        return handle(message)

    crew.workers[1].handle = refuse  # type: ignore[method-assign]
    with pytest.raises(Unworkable, match="stage 1 refuses what it is sent, 3 times"):
        crew.policy.generate([[5] * 40], 2, Sampling(3), [1])
    assert crew.refused["shape"] == 3 and crew.repairs == 0
    crew.workers[1].handle = handle  # type: ignore[method-assign]
    crew.policy.generate(PROMPTS, 2, Sampling(3), [1, 2, 3, 4, 5])


@pytest.mark.parametrize(
    ("squares", "own", "named"),
    [
        ({0: 0.1, 1: None, 2: 0.2}, {0}, {1}),
        ({0: 0.1, 1: 1e300}, {0}, {1}),
        ({0: 0.0, 1: 1e300}, {0}, {1}),  # nothing of stage 0 is trained
        ({0: 0.1, 1: 1e-300}, {0}, set()),  # a lie that makes nobody else suspect
        ({0: 0.1, 1: 1e300, 2: 0.2, 3: 1e290}, {0}, {1, 3}),
        ({0: 1e-3, 1: 900.0}, {0}, set()),
        ({0: None, 1: 0.2}, {0}, {0}),
        ({0: 0.0, 1: 0.0}, {0}, set()),
    ],
)
def test_stages_that_say_what_cannot_be_are_told_apart(
    squares: dict[int, float | None], own: set[int], named: set[int]
) -> None:
    assert impossible(squares, own).keys() == named


def lying(crew: Crew, stage: int, told: Iterator[float | None]) -> None:
    """From now on that stage says in turn that its squares are so many times what they are; None = not finite."""
    squares = crew.workers[stage]._squares

    def lie() -> StageMessage:
        true, times = squares(), next(told)
        assert isinstance(true.head, GradientNorm) and true.head.squares is not None
        said = None if times is None else true.head.squares * times
        return StageMessage(LEADER, structs.replace(true.head, squares=said))

    crew.workers[stage]._squares = lie  # type: ignore[method-assign]


def test_a_stage_that_says_now_and_then_what_cannot_be_is_given_up(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "OFTEN", 4)
    crew, lost = Crew(saved("llama"), 3, grpo()), list[StageLost]()
    crew.driver.on_lost = lost.append
    lying(crew, 1, cycle([None, None, *[1.0] * (driver.RECENT - 2)]))
    steps = [crew.trainer.step(some_groups(10 * i)) for i in range(driver.RECENT + 2)]
    assert [each.stages for each in lost] == [{1}] and "its gradient is not finite" in str(lost[0])
    assert sum("grad_norm" not in metrics for metrics in steps) == 3 and not crew.said


def test_a_stage_whose_log_probabilities_spoil_the_loss_is_given_up(saved: Saved) -> None:
    """They are what log-probabilities may be, and infinitely far from those of the reference."""
    crew, lost, said = Crew(saved("llama"), 3, grpo(beta=0.05)), list[StageLost](), list[str]()
    crew.driver.on_lost, crew.trainer.report = lost.append, said.append
    forward = crew.workers[2]._forward

    def lie(message: StageMessage, head: Forward) -> list[StageMessage]:
        out = forward(message, head)
        if head.reference or lost:
            return out
        return [replace(each, tensors=(torch.full_like(each.tensors[0], -1e4), *each.tensors[1:])) for each in out]

    crew.workers[2]._forward = lie  # type: ignore[method-assign]
    steps = [crew.trainer.step(some_groups(10 * i)) for i in range(driver.TRIES + 1)]
    assert [each.stages for each in lost] == [{2}] and "log-probabilities" in str(lost[0])
    assert "grad_norm" in steps[-1], "the truth makes an update"
    assert not any("grad_norm" in metrics for metrics in steps[: driver.TRIES - 1])
    assert said and all(line.startswith("stage 2 says log-probabilities") for line in said)


def test_a_stage_whose_gradient_is_unusual_is_named_once(saved: Saved) -> None:
    crew = Crew(saved("llama"), 3, grpo())
    crew.trainer.step(some_groups())
    assert not crew.said, "the truth is not unusual"
    lying(crew, 1, cycle([1e5, 1.0]))
    norms = [crew.trainer.step(some_groups(10 * i))["grad_norm"] for i in range(4)]
    assert norms[0] > 10 * norms[1] and crew.policy.version == 5 and crew.repairs == 0
    (sentence,) = crew.said
    assert sentence.startswith("stage 1 says that its gradient has norm ") and "steps of all stages" in sentence


@pytest.mark.parametrize("stages", [3, 5])
def test_weights_that_are_not_finite_make_no_update(stages: int, saved: Saved) -> None:
    crew, said = Crew(saved("llama"), stages, grpo()), []
    crew.trainer.report = said.append
    with torch.no_grad():
        next(iter(crew.workers[1].stage.named().values()))[0] = float("nan")
    before = {name: p.clone() for name, p in parameters(crew).items()}
    metrics = crew.trainer.step(some_groups())
    assert "grad_norm" not in metrics and crew.policy.version == 0 and not crew.refused
    assert said == ["stage 1 says that its gradient is not finite: update skipped"]
    assert all(
        torch.equal(p, before[n]) or n == next(iter(crew.workers[1].stage.named())) for n, p in parameters(crew).items()
    )


def test_a_stage_short_of_memory_makes_microbatches_smaller(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    config, options = saved("llama"), grpo(microbatch_tokens=64)
    undisturbed, crew = (Crew(config, 3, options, seed=6) for _ in range(2))
    for c in (undisturbed, crew):
        c.policy.microbatches = 1  # large ones
    stage, failed = crew.workers[1].stage, []
    layers = stage.layers

    def short(hidden: torch.Tensor, *rest: object) -> torch.Tensor:
        if hidden.shape[0] * hidden.shape[1] > 24:
            failed.append(hidden.shape)
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return layers(hidden, *rest)

    monkeypatch.setattr(stage, "layers", short)
    for c in (undisturbed, crew):
        c.trainer.step(some_groups())
    assert failed and crew.trainer.limit < 64 and crew.repairs == 0
    expected = parameters(undisturbed)
    for name, value in parameters(crew).items():
        torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=0, msg=name)


def idle(worker: Worker) -> bool:
    """No activations or caches of a turn are held."""
    return worker._pass is None and not worker._sampler._waves and worker._sampler._engine is None


def test_passes_that_are_given_up_leave_nothing_behind(saved: Saved) -> None:
    crew = Crew(saved("llama"), 3, grpo(microbatch_tokens=12, packing=False))
    rollouts, policy = count(), crew.policy
    rows = [Row(group.prompt_ids, [r.token_ids], next(rollouts)) for group in some_groups() for r in group.rollouts]
    flat, microbatches = flatten(rows), plan(rows, False, 12, policy.width)
    assert len(microbatches) > 2
    crew.trainer.optimizer.zero_grad()
    passes = policy.passes((token_batch(r, flat, policy.pad_id, policy.device) for r in microbatches), 1.0)
    _, logprobs, _ = next(passes)
    assert logprobs.requires_grad and not all(map(idle, crew.workers.values()))
    passes.close()
    while (message := crew.receive(0.0)) is not None:
        attend(message, crew.own, crew.send, crew.refuse)
    assert all(map(idle, crew.workers.values()))
    crew.trainer.step(some_groups())
    assert crew.policy.version == 1 and not crew.refused


@pytest.mark.parametrize(("codec", "cosine"), [("bfloat16", 0.98), ("int8", 0.95)])
def test_activations_may_travel_in_fewer_bits(codec: str, cosine: float, saved: Saved) -> None:
    config, options = saved("llama_tied"), grpo()
    exact, crew = (Crew(config, 3, options, codec=c) for c in ("float32", codec))
    start = {name: p.clone() for name, p in parameters(crew).items()}
    metrics = [[c.trainer.step(some_groups(10 * i)) for i in range(3)] for c in (exact, crew)]
    for a, b in zip(*metrics, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=0.05) and b["entropy"] == pytest.approx(a["entropy"], rel=0.02)
    moves = [torch.cat([(p - start[n]).flatten() for n, p in parameters(c).items()]) for c in (exact, crew)]
    assert torch.cosine_similarity(*moves, dim=0) > cosine
    few, many = (c.driver.calls.figures()["stages/bytes_per_token"] for c in (crew, exact))
    assert few < 0.8 * many


# --------------------------------------------------------------------- samples

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12], [13, 14], [15, 5, 6]]


def assert_equal_samples(crew: Crew, policy: Policy) -> None:
    n, sampling = 3, Sampling(8, 0.9, 0.95)
    seeds = [100 + i for i in range(len(PROMPTS))]
    expected = policy.generate(PROMPTS, n, sampling, seeds)
    found = crew.policy.generate(PROMPTS, n, sampling, seeds)
    assert [len(g) for g in found] == [n] * len(PROMPTS)
    ended = 0
    for a, b in zip((r for g in expected for r in g), (r for g in found for r in g), strict=True):
        assert (a.token_ids, a.finished, a.text) == (b.token_ids, b.finished, b.text)
        assert b.logprobs == pytest.approx(a.logprobs, abs=1e-4)
        ended += b.finished
    assert crew.refused.keys() <= ({"plan"} if crew.faults else set())
    assert ended == 0 or any(len(r.token_ids) > 1 for g in found for r in g)


@pytest.mark.parametrize(
    ("stages", "kind", "native", "lora"),
    [
        (1, "llama", True, False),
        (2, "llama_tied", True, False),
        (3, "qwen2", True, True),
        (4, "llama", False, False),
        (3, "gpt_neox", False, False),
    ],
)
def test_staged_samples_are_the_samples(stages: int, kind: str, native: bool, lora: bool, saved: Saved) -> None:
    config = saved(kind, lora)
    policy = whole(config)
    crew = Crew(config, stages, seed=stages, native=native)
    for model in (policy, crew.policy):
        model.eos_ids = [2, *range(20, 60)]  # so that some rows end early and the grid shrinks
    assert_equal_samples(crew, policy)
    assert crew.driver.calls.figures()["stages/bytes_per_token"] > 0 if stages > 1 else True


def test_caches_are_dropped_when_a_generation_is_over(saved: Saved) -> None:
    crew = Crew(saved("llama"), 3)
    crew.policy.generate(PROMPTS, 2, Sampling(3), [1, 2, 3, 4, 5])
    while crew.receive(0.0) is not None:
        pass  # what is still under way
    assert all(map(idle, list(crew.workers.values())[1:]))
