"""Commands that train, measure, export and merge models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from swarm_node.cli.options import (
    CommandSettings,
    Json,
    is_swarm,
    note,
    option,
    rewards_in,
    split_names,
    starting,
    tasks_in,
)
from swarm_node.config import load_config
from swarm_node.config.options import OF_A_SWARM, explanation
from swarm_node.errors import UserError
from swarm_node.install import check_extra
from swarm_node.storage.new_file import check_new_file
from swarm_node.storage.rundir import RunDir, check_new_directory

HELD_OUT_HELP = "Held-out questions, over all tasks; by default as many as the run has."
WhichCheckpoint = Annotated[
    Literal["newest", "best"],
    option("--checkpoint", "Checkpoint of the run: `newest`, or `best` by held-out figures while it trained."),
]
NewModel = Annotated[Path, option("--out", "New directory for the model.", metavar="DIR")]


def starter(
    out: NewModel,
    layers: Annotated[int, option("--layers", "Transformer layers.", min=1)] = 2,
    hidden: Annotated[int, option("--hidden", "Width, a multiple of 32.", min=32)] = 128,
    steps: Annotated[int, option("--steps", "Training steps.", min=1)] = 350,
    seed: Annotated[int, option("--seed", explanation("seed"), min=0)] = 0,
) -> None:
    """Train the starter model, or a bigger one, from nothing."""
    check_new_directory(out, make=False)
    starting()
    from swarm_node.cli.commands.starter import make_starter

    typer.echo(make_starter(out, layers=layers, hidden=hidden, steps=steps, seed=seed))


def get_model(
    named: Annotated[
        str, typer.Argument(metavar="MODEL", help="`smollm2`, a GGUF file, or a hub id.", show_default=False)
    ],
) -> None:
    """Get a model before a run needs it, or dequantise a GGUF file, and print its directory."""
    from swarm_node.policy.model_path import located

    folder = located(named, note)
    if not Path(folder).is_dir():
        starting()
        from swarm_node.swarm.base_weights.finding import downloaded

        folder = str(downloaded(folder))
    typer.echo(folder)


def evaluate_model(
    settings: CommandSettings,
    target: Annotated[str, typer.Argument(metavar="RUN|MODEL", help="Run directory, model path or hub id.")],
    tasks: Annotated[
        list[str] | None,
        option(
            "--tasks",
            explanation("tasks").replace("train on", "ask")
            + " By default `eval.tasks` of the run, else those it trains on. Repeatable or comma-separated.",
            metavar="NAME|FILE",
        ),
    ] = None,
    reward: Annotated[
        list[str] | None,
        option(
            "--reward",
            explanation("rewards.functions") + " Those that only the run names are left out. Repeatable or "
            "comma-separated.",
            metavar="FILE.py:FUNCTION",
        ),
    ] = None,
    like: Annotated[
        Path | None,
        option(
            "--like",
            "Measure as this run measures itself: its prompt, answers, sampling, tasks, questions, samples and dtype.",
            metavar="RUN",
        ),
    ] = None,
    samples: Annotated[
        int | None, option("--samples", "Samples per question; by default as many as the run takes, else 8.", min=1)
    ] = None,
    questions: Annotated[int | None, option("--questions", HELD_OUT_HELP, min=1)] = None,
    every: Annotated[
        bool, option("--all", "Ask every question of the tasks once; they must be files.", "ALL_QUESTIONS")
    ] = False,
    checkpoint: WhichCheckpoint = "newest",
    out: Annotated[
        Path | None, option("--out", "New file for all answers, one JSON line for each question.", metavar="FILE")
    ] = None,
    json_output: Json = False,
) -> None:
    """Measure pass@1, pass@k and rewards on held-out questions, or on all of a test file.

    --config, --set and variables change how it is asked, for this measurement.
    """
    from swarm_node.policy.model_path import checked
    from swarm_node.runtime.preflight import check_functions
    from swarm_node.tasks.checking import check_end, check_specs

    named, functions = tasks_in(tasks), rewards_in(reward)
    check_specs(named or [], answer_needed=False)
    check_functions(functions or [])
    if every:
        check_end(named or [])
        if questions is not None:
            raise UserError("--all asks every question, and --questions some: leave out one of them")
    is_run = RunDir(target).exists
    if Path(target).parts[:1] == ("runs",):
        RunDir(target).check_exists()
    elif not is_run:
        checked(target)
    if like is not None:
        RunDir(like).check_exists()
    given = settings.of_a_measurement(is_run)
    if out is not None:
        check_new_file(out)
    starting()
    from swarm_node.cli.commands.evaluate import main

    main(
        target,
        tasks=named,
        samples=samples,
        questions=questions,
        json_output=json_output,
        which=checkpoint,
        every=every,
        out=out,
        functions=functions,
        like=like,
        given=given,
    )


def export(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN…", help="Run directory; for a crew, those that have all its stages."),
    ],
    out: Annotated[Path, typer.Argument(help="New directory for the model.")],
    checkpoint: WhichCheckpoint = "newest",
    merged: Annotated[
        bool, option("--merged", "Merge a trained adapter into its base: one model that needs nothing else.")
    ] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        option("--dtype", "Number format of the files; by default that of the checkpoint, or of the base if merged."),
    ] = None,
    base: Annotated[
        str | None,
        option("--base", "Name of the base on the hub, for the card and the adapter.", metavar="OWNER/NAME"),
    ] = None,
) -> None:
    """Write the trained model for transformers (or PEFT, if it is an adapter)."""
    for run in runs:
        RunDir(run).check_exists()
    if base is not None:
        from swarm_node.policy.model_path import check_hub_id

        check_hub_id(base)
    check_new_directory(out, make=False)
    starting()
    from swarm_node.cli.commands.export import export_run

    export_run(runs, out, partial(note, err=False), checkpoint, merged=merged, dtype=dtype, base=base)


def merge_models(
    settings: CommandSettings,
    sources: Annotated[
        list[str],
        typer.Argument(metavar="RUN…|SWARM", help="Run directories, two or more; or a swarm, as `join` takes it."),
    ],
    out: NewModel,
    method: Annotated[
        Literal["uniform", "task-arithmetic"],
        option(
            "--method",
            "`uniform`: the mean of the weights. `task-arithmetic`: the start plus SCALE times the sum of all changes, "
            "each clipped to the median length.",
        ),
    ] = "uniform",
    scale: Annotated[
        float | None,
        option("--scale", "For task arithmetic; by default the best of a few, on half of the held-out questions."),
    ] = None,
    questions: Annotated[int | None, option("--questions", f"{HELD_OUT_HELP} 0 = none.", min=0)] = None,
    reward: Annotated[
        list[str] | None,
        option(
            "--reward",
            explanation("rewards.functions") + " Those that only the runs name are left out. Repeatable or "
            "comma-separated.",
            metavar="FILE.py:FUNCTION",
        ),
    ] = None,
    cohort: Annotated[
        str | None,
        option(
            "--cohort",
            "Cohort whose weights are merged; by default the largest of this model.",
            rich_help_panel=OF_A_SWARM,
        ),
    ] = None,
    without: Annotated[
        list[str] | None,
        option(
            "--without",
            "Member to leave out: its name, or the last 8 or more characters of its peer id. Repeatable.",
            metavar="PEER",
            rich_help_panel=OF_A_SWARM,
        ),
    ] = None,
    timeout: Annotated[
        float,
        option(
            "--timeout",
            "Most seconds to find members, and again for all weights to arrive.",
            min=1,
            rich_help_panel=OF_A_SWARM,
        ),
    ] = 1800.0,
    json_output: Json = False,
) -> None:
    """Merge runs that started from the same model, or the members of a swarm, into one model.

    It is measured against each of them on held-out questions. Members go on training meanwhile. --model, --config and
    --set say how they load their model, as for `join`; the config.toml of any member's run will do.
    """
    with_swarm = any(map(is_swarm, sources))
    limit = settings.flags.get("max_memory")
    of_a_swarm = replace(settings, flags=settings.flags | {"max_memory": None}).any_typed
    if (cohort or without or of_a_swarm) and not with_swarm:
        raise UserError(
            "--cohort, --without, --model and --set are for merging a swarm, and so is --config: a run has its own "
            "settings"
        )
    if with_swarm and len(sources) > 1:
        raise UserError("a merge is of one swarm, or of run directories")
    runs = [] if with_swarm else runs_of(sources)
    check_new_directory(out, make=False)
    from swarm_node.runtime.preflight import check_functions

    if with_swarm:
        check_extra("swarm", "a swarm")
    functions = rewards_in(reward)
    check_functions(functions or [])
    starting()
    from swarm_node.cli.commands.merge import MergeRequest, main

    left_out = split_names(without) or []
    request = MergeRequest(out, method, scale, questions, json_output, timeout, cohort, left_out, functions)
    if limit is not None:
        request = replace(request, max_memory_gb=load_config(flags={"max_memory": limit}).resources.max_memory_gb)
    if with_swarm:
        from swarm_node.cli.commands.merge_swarm import main as merge_members

        config = settings.load()
        if functions is not None:
            config = config.model_copy(update={"rewards": config.rewards.model_copy(update={"functions": functions})})
        merge_members(sources[0], config, request)
    else:
        main(runs, request)


def bench(
    settings: CommandSettings,
    minutes: Annotated[float, option("--minutes", "Most minutes to measure.", min=0.5)] = 10.0,
    prompts: Annotated[
        int,
        option(
            "--prompts",
            "Questions of a step; 0 = 8, or 1 for a model above 20 million parameters on a CPU.",
            min=0,
        ),
    ] = 0,
    group_size: Annotated[int, option("--group-size", "Answers to each question.", min=2)] = 8,
    length: Annotated[int, option("--length", "Tokens of each answer.", min=1)] = 64,
    file: Annotated[
        Path | None,
        option("--json", "File for the figures; by default bench-<model>.json, which is replaced.", metavar="FILE"),
    ] = None,
) -> None:
    """Measure how fast a GRPO step is on this machine, and in how much memory; also TRL's, where it is installed.

    Prints one row for each and writes the figures to a file, which names neither this machine nor a path.
    Every answer runs to its full length.
    """
    config = settings.load()
    from swarm_node.policy.extras import check_quantiser
    from swarm_node.policy.model_path import checked

    check_quantiser(config.policy)
    checked(config.policy.model)
    from swarm_node.cli.commands.bench import BenchRequest, main

    main(config, BenchRequest(minutes, group_size, length, prompts, file), note)


def runs_of(sources: Sequence[str]) -> list[RunDir]:
    """The runs to merge. Raises UserError unless there are two or more."""
    runs = [RunDir(source) for source in sources]
    for run in runs:
        run.check_exists()
    if len({run.path.resolve() for run in runs}) < max(2, len(runs)):
        raise UserError("a merge takes at least two different run directories, each of them once")
    return runs
