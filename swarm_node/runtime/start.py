"""Starts a run of the kind that the configuration asks for: alone, as a member of a swarm, or as one of a crew.

    swarm-node local, join --\
    swarm_node.train --------> start -> Run, or a crew's node
"""

from __future__ import annotations

from contextlib import ExitStack

import torch

from swarm_node.config import NodeConfig
from swarm_node.errors import PluginError, StopRequested
from swarm_node.observability.summary import Figures
from swarm_node.policy.finite import NotFinite
from swarm_node.runtime.callbacks import Callbacks, Manner, TrainResult
from swarm_node.runtime.console import Console, say
from swarm_node.runtime.loop import Run
from swarm_node.runtime.pause import refuse_in_a_crew
from swarm_node.runtime.preemption import aside, stopping
from swarm_node.runtime.shutdown import NOT_BEGUN
from swarm_node.runtime.stop_request import stopping_when_asked
from swarm_node.storage.rundir import RunDir
from swarm_node.swarm.links import Swarm


def start(config: NodeConfig, run: RunDir, swarm: Swarm | None, manner: Manner) -> TrainResult:
    """Train until `rounds` or `minutes` are over or a signal comes; resume the run that is in the directory, which the
    caller has opened.

    A member of `swarm` waits for others only once, for the swarm's manifest. With `pipeline.stages`, as many processes
    hold the policy, or this node is one of a crew. Raises UserError.
    """
    threads = torch.get_num_threads()
    try:
        if config.pipeline.stages and swarm is not None:
            from swarm_node.runtime.pipeline_run import run_crew

            return run_crew(config, run, manner, swarm)
        if config.pipeline.stages:
            from swarm_node.runtime.local_pipeline import run_local_crew

            refuse_in_a_crew(config, run)
            return run_local_crew(config, run, manner)
        return _run(config if swarm is not None else config.model_copy(update={"swarm": None}), run, manner, swarm)
    finally:
        torch.set_num_threads(threads)


def _run(config: NodeConfig, run: RunDir, manner: Manner, swarm: Swarm | None) -> TrainResult:
    whole: Run | None = None
    callbacks = Callbacks(manner.callbacks)

    def last_resort() -> None:
        if whole is None:
            aside(console.leave, NOT_BEGUN)
        else:
            whole.last_resort()

    with ExitStack() as stack:
        stack.callback(run.abandon)  # unless it has begun by then
        console = Console(config, run, manner.json_output, stack, manner.quiet, manner.health)
        told = config.spot, last_resort, say, console.health.measures
        stop = stack.enter_context(stopping(manner.embedded, *told))
        stack.enter_context(stopping_when_asked(run, stop, say))
        with ExitStack() as inner:
            try:
                whole = Run(config, run, inner, stop, console, swarm, callbacks=callbacks)
            except StopRequested:
                console.leave(NOT_BEGUN)
                stop.safe()
                return TrainResult(run.path, 0, False, Figures(), None)
            run.keep()
            try:
                whole.train()
            except NotFinite as error:
                error.args = (f"{error}; {_before_it(whole)}",)
                raise
            except PluginError as error:
                if whole.node.round and not whole.weights.unfinished:
                    saved = "round 1 is saved" if whole.node.round == 1 else f"rounds 1-{whole.node.round} are saved"
                    error.args = (f"{error}; {saved}: mend it, then {whole.goes_on()} goes on",)
                raise
        report = whole.report()  # the swarm has been left
        report.draw()
        return callbacks.end(whole.result(report))


def _before_it(whole: Run) -> str:
    """What is left of a run whose weights are not finite any more, and how to go on."""
    rate = whole.node.in_effect().get("grpo.learning_rate")  # a crew's is not known here
    lower = f"--set grpo.learning_rate={'LOWER' if rate is None else f'{rate / 10:.1g}'}"
    if whole.state.saved is None:
        return f"nothing is saved: start again with {lower}"
    return f"the checkpoint of round {whole.state.saved} is as it was: {whole.goes_on(lower)} goes on from there"
