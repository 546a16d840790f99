"""What is said of a run when it has ended, word for word, and the numbers behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from swarm_node.observability import summary as summaries
from swarm_node.observability.noise import interval
from swarm_node.observability.summary import (
    INDENT,
    Answered,
    Averaging,
    Figures,
    HeldOut,
    Stages,
    SwarmFigures,
    next_steps,
    summary,
    whereabouts,
)
from swarm_node.storage.going_on import GoingOn
from tests.support.run_files import tallied

HELD = HeldOut(questions=128, samples=8, pass_1=(0.199, 0.355), pass_k=(0.578, 0.395), interval=(0.112, 0.201))


def rounds(rewards: list[float], **columns: list[Any]) -> list[dict[str, Any]]:
    """Records of metrics.jsonl; None in a column = the name is missing from that line."""
    records = []
    for i, reward in enumerate(rewards):
        more = {name.replace("__", "/"): values[i] for name, values in columns.items() if values[i] is not None}
        records.append({"round": i + 1, "reward": reward, "step_time": 0.5, "num_tokens": 1000 * (i + 1), **more})
    return records


def figures(records: list[dict[str, Any]], **more: Any) -> Figures:
    return summaries.figures(tallied(records), **more)


def test_a_silo() -> None:
    run = figures(rounds([i / 20 for i in range(20)]), held_out=HELD)
    assert summary(run) == [
        "outcome   reward 0.025 -> 0.925, first and last tenth of 20 rounds",
        "          held-out pass@1 0.199 -> 0.355, +0.156: more than noise (95 % interval +0.112 to +0.201, "
        "128 questions)",
        "          held-out pass@8 0.578 -> 0.395",
        "rounds    20 in 0:10, 0.50 s each; 20,000 tokens trained on, prompts included",
    ]
    assert run.swarm is None and run.averaging is None and run.stages is None, "nothing that did not happen"


def test_a_member_that_averages_and_pays() -> None:
    run = figures(
        rounds(
            [0.25, 0.5],
            swarm__groups_received=[100, 1240],
            swarm__groups_admitted=[50, 1000],
            swarm__groups_own=[4, 4],
            swarm__groups_used=[0, 4],
            swarm__groups_sent=[4, 8],
            swarm__bytes_in=[1e6, 2.5e6],
            swarm__bytes_out=[1e5, 2e5],
            swarm__rejected__zero=[None, 200],
            swarm__rejected__age=[3, 20],
            swarm__rejected__duplicate=[0, 15],
            swarm__rejected__swarm=[1, 4],
            swarm__rejected__quota=[1, 1],
            averaging__exchanges=[0, 1],
            averaging__bytes=[0, 1_750_000],
            averaging__refused__gates=[None, 3],
            cost__spent=[0.01, 0.0234],
            cost__per_admitted_group=[0.0025, 0.00195],
        )
    )
    assert summary(run) == [
        "outcome   reward 0.250 in the first, 0.500 in the last of 2 rounds: too few rounds for a trend",
        "received  1,240 groups from others, 1,000 admitted, 4 used",
        "          weights of others in 1 exchange",
        "gave      8 groups published",
        "          its weights in 1 exchange, 1.8 MB",
        "not used  200 all rewarded alike, 20 too old, 15 known already",
        "refused   4 of another swarm, 3 of weights (gates), 1 over the sender's quota",
        "traffic   2.5 MB received, 200 kB sent",
        "rounds    2 in 0:01, 0.50 s each; 2,000 tokens trained on, prompts included",
        "cost      0.0234 spent by the end of the last round, 0.00195 a group trained on",
    ]


def test_a_crew_s_lead() -> None:
    run = figures(
        rounds(
            [0.5, 0.5, 0.5],
            stages__lost=[None, 1, 2],
            stages__recovered__base=[2, 2, 2],
            stages__recovered__replica=[None, 1, 1],
            stages__recovered__neighbours=[None, None, 1],
            stages__refused__stray=[None, None, 1],
        )
    )
    assert run.stages == Stages(2, {"base": 2, "replica": 1, "neighbours": 1})
    assert summary(run)[1:3] == [
        "crew      2 stages lost; rebuilt so far: 2 by base, 1 by replica, 1 by neighbours",
        "refused   1 of the crew (stray)",
    ]
    assert figures(rounds([0.5], stages__recovered__base=[2])).stages is None, "so every crew begins"


def test_few_rounds_leave_little_to_say() -> None:
    assert summary(figures(rounds([0.5]))) == [
        "outcome   reward 0.500 in its only round",
        "rounds    1 in 0:00; 1,000 tokens trained on, prompts included",
    ]
    assert summary(figures([])) == [] and figures([]) == Figures()


def test_a_run_without_an_update_says_so() -> None:
    idle = {"num_tokens": 0, "frac_reward_zero_std": 1.0}
    run = figures([record | idle for record in rounds([0.0, *[0.5] * 19])])
    assert summary(run)[-1] == "rounds    20 in 0:10, 0.50 s each; no update was made: no group had different rewards"
    differed = figures([record | idle | {"frac_reward_zero_std": 0.5} for record in rounds([0.5])])
    assert summary(differed)[-1].endswith("; no update was made")


def test_a_resumed_run_is_told_as_a_whole() -> None:
    sent, received, lost = [4, 8, 12, 2, 6], [10, 20, 30, None, 40], [None, 1, 1, None, 1]
    exchanges = [0, 1, 2, 2, 3]  # these go on, being in the checkpoint
    run = figures(
        rounds(
            [0.0, 0.0, 0.0, 1.0, 1.0],
            swarm__groups_sent=sent,
            swarm__groups_received=received,
            stages__lost=lost,
            averaging__exchanges=exchanges,
        ),
        resumed_at=3,
    )
    assert run.swarm == SwarmFigures(sent=12 + 6, received=30 + 40)
    assert run.stages == Stages(2, {}) and run.averaging == Averaging(3, 0)
    assert summary(run)[-1] == f"{'':{INDENT}}in several starts; this one went on from round 3"


def test_json_says_what_the_sentences_say() -> None:
    silo = msgspec.to_builtins(figures(rounds([0.5]), held_out=HELD))
    assert silo.keys() == {
        "rounds_recorded",
        "reward_first_tenth",
        "reward_last_tenth",
        "seconds",
        "num_tokens",
        "held_out",
    }
    assert list(silo["held_out"]["interval"]) == [0.112, 0.201]
    member = msgspec.to_builtins(figures(rounds([0.5], swarm__groups_sent=[3], swarm__rejected__age=[2])))
    assert member["swarm"] == {"sent": 3} and member["unused"] == {"age": 2} and "refused" not in member


def test_answers_cut_off_in_the_last_round_are_told() -> None:
    cut = "87% cut off at the length limit in the last round: rollouts.max_new_tokens sets it"
    told = summary(figures(rounds([0.1, 0.1], completions__clipped_ratio=[0.2, 0.87])))
    assert told[1].split(maxsplit=0)[0].strip() == cut
    assert not any("cut off" in line for line in summary(figures(rounds([0.1], completions__clipped_ratio=[0.4]))))


@pytest.mark.parametrize(
    ("interval", "words"),
    [
        ((-0.01, 0.05), "+0.020: no more than noise (95 % interval -0.010 to +0.050, 128 questions)"),
        ((0.0, 0.0), "+0.020: no more than noise (95 % interval +0.000 to +0.000, 128 questions)"),
        (None, "+0.020: 128 questions are too few to tell it from noise"),
    ],
)
def test_noise_is_called_noise(interval: tuple[float, float] | None, words: str) -> None:
    held = HeldOut(128, 1, (0.20, 0.22), (0.20, 0.22), interval)
    assert summary(Figures(held_out=held)) == [f"outcome   held-out pass@1 0.200 -> 0.220, {words}"]


@pytest.mark.parametrize(
    ("interval", "words"),
    [
        ((-0.25, -0.1), ": more than noise (-0.250 to -0.100)"),
        ((-0.25, 0.1), ": no more than noise (-0.250 to +0.100)"),
        (None, ""),
    ],
)
def test_several_tries_have_a_verdict_too(interval: tuple[float, float] | None, words: str) -> None:
    held = msgspec.structs.replace(HELD, interval_k=interval)
    line = f"          held-out pass@8 0.578 -> 0.395{words}"
    assert line in summary(Figures(held_out=held))
    fell = msgspec.structs.replace(held, remarks=["held-out pass@8 fell by more than noise, from 0.578 to 0.395"])
    assert line not in summary(Figures(held_out=fell)), "it is said once, with a remedy"


def test_a_mean_reward_has_a_verdict_too() -> None:
    held = msgspec.structs.replace(HELD, reward=(0.479, 1.0), interval_reward=(0.4, 0.6))
    line = "          held-out mean reward 0.479 -> 1.000: more than noise (+0.400 to +0.600)"
    assert line in summary(Figures(held_out=held))


def test_a_large_gain_is_told_from_few_questions() -> None:
    before, after = [0.0] * 45, [0.0, 0.0, 1.0] * 15
    low, high = interval(before, after) or (0.0, 0.0)
    assert 0.15 < low < 1 / 3 < high < 0.5
    [line] = summary(Figures(held_out=HeldOut(45, 1, (0.0, 1 / 3), (0.0, 1 / 3), (low, high))))
    assert f"+0.333: more than noise (95 % interval {low:+.3f} to {high:+.3f}, 45 questions, which make it" in line
    [line] = summary(Figures(held_out=HeldOut(9, 1, (0.0, 1.0), (0.0, 1.0), None)))
    assert line.endswith("+1.000: 9 questions are too few to tell it from noise")


# ------------------------------------------------------------------- where things are, what to type


def test_where_things_are_and_what_to_type() -> None:
    assert whereabouts("runs/a", ["metrics.jsonl", "plots/reward.png"]) == [
        "files     runs/a: metrics.jsonl, plots/reward.png"
    ]
    mine = GoingOn("resume 'runs/my run' --rounds 40")
    assert next_steps("runs/my run", mine) == [
        "next      swarm-node resume 'runs/my run' --rounds 40",
        "          swarm-node eval 'runs/my run'",
        "          swarm-node export 'runs/my run' 'runs/my run-model'",
        "          swarm-node dashboard 'runs/my run'",
    ]
    again = GoingOn("resume r")
    assert not any(" eval " in line for line in next_steps("r", again, evaluates=False)), "there is no question for it"
    assert next_steps("r", again, best=True)[1:3] == [
        "          swarm-node eval r --checkpoint best",
        "          swarm-node export r r-model --checkpoint best",
    ]
    kept = ["          swarm-node samples r", "          swarm-node dashboard r"]
    assert next_steps("r", again, samples=True)[-2:] == kept
    assert next_steps("r", again, whole=False, evaluates=False) == [
        "next      swarm-node resume r",
        "          swarm-node dashboard r",
    ]
    assert next_steps("r", GoingOn(instead="start the program again"), whole=False, evaluates=False) == [
        "next      swarm-node dashboard r",
        "          to go on, start the program again",
    ]


def test_the_next_model_gets_a_new_directory(tmp_path: Path) -> None:
    (tmp_path / "r-model").mkdir()
    (tmp_path / "r-model-2").mkdir()
    assert f"          swarm-node export {tmp_path}/r {tmp_path}/r-model-3" in next_steps(f"{tmp_path}/r", GoingOn())


def test_answers_are_shown_before_and_after_on_a_line_each() -> None:
    one = Answered("gcd", "GCD of\n12 and 18?", "6", "\x1b[2J3", False, "x" * 500 + " so 6", True, 0.25, 1.0)
    empty = Answered("own", "Anything?", "", "", False, "no", False, 0.0, 0.0)
    assert summaries.answered(msgspec.structs.replace(HELD, answers=[one, empty], answers_of=24)) == [
        "answers   the first of 8 answers to three of 24 held-out questions",
        "          most improved, gcd: GCD of 12 and 18? (right: 6)",
        "            before ?[2J3 -> wrong (2 of 8 right)",
        "            after  " + "x" * 38 + " […] " + "x" * 72 + " so 6 -> right (8 of 8 right)",
        "          least improved, own: Anything?",
        "            before (empty) -> wrong (0 of 8 right)",
        "            after  no -> wrong (0 of 8 right)",
    ]
    neither = summaries.answered(msgspec.structs.replace(HELD, answers=[empty, empty], answers_of=24))
    assert neither[1] == "          not improved, own: Anything?"
    assert summaries.answered(HELD) == summaries.answered(None) == []
    earlier = msgspec.structs.replace(HELD, answers=[empty], answers_of=24, round=1200)
    assert summaries.answered(earlier)[2:] == [
        "            before            (empty) -> wrong (0 of 8 right)",
        "            after round 1,200 no -> wrong (0 of 8 right)",
    ]


def test_a_run_that_was_stopped_says_of_which_round_its_figures_are() -> None:
    held = msgspec.structs.replace(HELD, round=1200, best=(800, 0.4), remarks=["gcd fell"])
    lines = summary(figures(rounds([0.5, 0.5]), held_out=held))
    assert "held-out pass@1 0.199 -> 0.355 after round 1,200, not measured since, +0.156: more than noise" in lines[1]
    assert lines[3] == "worse     gcd fell"
    assert lines[4] == (
        "best      held-out pass@1 0.400 after round 800: `export` and `eval` take it as --checkpoint best"
    )


OWN_REWARD = HeldOut(60, 4, None, None, (0.05, 0.15), reward=(-0.2, -0.1), figure="reward", best=(30, -0.05))


def test_a_run_with_own_rewards_goes_by_mean_reward() -> None:
    one = Answered("poems", "Write.", "", "a", None, "b", None, 0.25, 0.5, before_reward=0.1, after_reward=0.6)
    held = msgspec.structs.replace(OWN_REWARD, answers=[one], answers_of=1)
    words = summary(figures(rounds([i / 20 for i in range(20)]), held_out=held))
    assert words[:3] == [
        "outcome   reward 0.025 -> 0.925, first and last tenth of 20 rounds",
        "          held-out mean reward -0.200 -> -0.100, +0.100: more than noise (95 % interval +0.050 to +0.150, "
        "60 questions)",
        "best      held-out mean reward -0.050 after round 30: `export` and `eval` take it as --checkpoint best",
    ]
    assert summaries.answered(held)[-2:] == [
        "            before a -> reward 0.100 (mean of 4 answers 0.250)",
        "            after  b -> reward 0.600 (mean of 4 answers 0.500)",
    ]


def test_rewards_stand_beside_what_a_checker_finds() -> None:
    both = msgspec.structs.replace(OWN_REWARD, pass_1=(0.5, 0.25), pass_k=(0.75, 0.75))
    lines = summary(Figures(held_out=both))
    assert lines[1:3] == ["          held-out pass@1 0.500 -> 0.250", "          held-out pass@4 0.750 -> 0.750"]
    beside = summary(Figures(held_out=msgspec.structs.replace(HELD, reward=(0.25, 0.5))))
    assert beside[2] == "          held-out mean reward 0.250 -> 0.500" and "pass@1" in beside[0]


def test_a_best_checkpoint_competes_with_the_start() -> None:
    held = msgspec.structs.replace(HELD, pass_1=(0.033, 0.0), best=(10, 0.033))
    assert "best      none: no checkpoint has a better held-out pass@1 than the start, 0.033" in summary(
        Figures(held_out=held)
    )
