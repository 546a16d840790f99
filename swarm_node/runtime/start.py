"""Starts a run of the kind that the configuration asks for: alone, as a member of a swarm, or as one of a crew."""

from __future__ import annotations

from contextlib import ExitStack

from swarm_node.config import NodeConfig
from swarm_node.errors import StopRequested
from swarm_node.runtime.console import Console, say
from swarm_node.runtime.loop import Run
from swarm_node.runtime.pause import refuse_in_a_crew
from swarm_node.runtime.preemption import aside, stopper
from swarm_node.storage.rundir import RunDir
from swarm_node.swarm.links import Swarm

NOT_BEGUN = "stopping before training began; the same command begins here again"


def run_local(config: NodeConfig, json_output: bool = False) -> int:
    """Train alone until `rounds` or `minutes` are over or a signal comes; resume the run that is in the directory.

    With `pipeline.stages`, as many processes hold the policy. Returns the exit code. Raises UserError.
    """
    if config.pipeline.stages:
        from swarm_node.runtime.local_pipeline import run_local_crew

        refuse_in_a_crew(config, RunDir(config.directory))
        return run_local_crew(config, json_output)
    return _run(config.model_copy(update={"swarm": None}), json_output)


def run_join(config: NodeConfig, swarm: Swarm, json_output: bool = False) -> int:
    """Train as a member of `swarm` until `rounds` or `minutes` are over or a signal comes; resume as `run_local` does.

    It waits for others only once, for the swarm's manifest. With `pipeline.stages`, this node is one of a crew.
    Returns the exit code. Raises UserError.
    """
    if config.pipeline.stages:
        from swarm_node.runtime.pipeline_run import run_crew

        return run_crew(config, json_output, swarm)
    return _run(config, json_output, swarm)


def _run(config: NodeConfig, json_output: bool, swarm: Swarm | None = None) -> int:
    whole: Run | None = None

    def last_resort() -> None:
        if whole is None:
            aside(console.leave, NOT_BEGUN)
        else:
            whole.last_resort()

    with ExitStack() as stack:
        run = stack.enter_context(RunDir.open(config.directory))
        console = Console(config, run, json_output, stack)
        stop = stack.enter_context(stopper(config.spot, last_resort, say))
        with ExitStack() as inner:
            try:
                whole = Run(config, run, inner, stop, console, swarm)
            except StopRequested:
                console.leave(NOT_BEGUN)
                stop.safe()
                return 0
            whole.train()
        whole.report().draw()  # the swarm has been left
    return 0
