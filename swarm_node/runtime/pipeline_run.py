"""A run of a node in a crew: it follows the leader, or leads.

open the directory -> swarm -> CrewNode.follow --this node is to lead--> Run.train -> drain, gather weights
                                   ^                                         |
                                   +---- another leads with a better right --+
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from statistics import fmean

from swarm_node.config import NodeConfig
from swarm_node.errors import StopRequested
from swarm_node.observability.progress import volume
from swarm_node.observability.summary import Figures
from swarm_node.pipeline.assemble import CrewParts, check_disk_room
from swarm_node.pipeline.crew import CrewNode, Deposed
from swarm_node.policy import tokenizing
from swarm_node.policy.loading import load_tokenizer
from swarm_node.runtime.callbacks import Callbacks, Manner, TrainResult
from swarm_node.runtime.console import Console, say
from swarm_node.runtime.drain import finish_mirror, open_mirror, say_reach
from swarm_node.runtime.loop import Run
from swarm_node.runtime.pause import refuse_in_a_crew
from swarm_node.runtime.preemption import stopping
from swarm_node.runtime.shutdown import Stopper
from swarm_node.runtime.stop_request import stopping_when_asked
from swarm_node.say import Warned
from swarm_node.storage.mirror import Mirror
from swarm_node.storage.rundir import RunDir
from swarm_node.swarm.join import join_swarm
from swarm_node.swarm.links import Swarm

PROMPTS_MEASURED = 16  # questions whose mean length stands for all in the estimate of traffic
STOPPING = "stopping; the same command takes a stage again"
ADVICE = "saving the stages that are held here"

Beside = Callable[[Callable[[], str], Callable[[str], None]], AbstractContextManager[None]]
"""(the join link, empty while there is none; how to say a sentence) -> the context of what runs beside the node."""


def run_crew(
    config: NodeConfig, run: RunDir, manner: Manner, swarm: Swarm, beside: Beside | None = None
) -> TrainResult:
    """Hold stages, and lead the crew while that is this node's task, until the run is over or a signal comes. The
    result has figures if this node led. Callbacks hear of the rounds that it leads. Raises UserError."""
    crew: CrewNode | None = None
    lead: Run | None = None
    callbacks = Callbacks(manner.callbacks)

    def last_resort() -> None:
        try:
            if lead is not None:
                lead.last_resort()
        finally:
            if crew is not None:
                crew.held_stages.save_all()

    refuse_in_a_crew(config, run)
    with ExitStack() as stack:
        stack.callback(run.abandon)  # unless it has begun by then
        console = Console(config, run, manner.json_output, stack, manner.quiet, manner.health)
        told = config.spot, last_resort, say, console.health.measures
        stop = stack.enter_context(stopping(manner.embedded, *told, ADVICE))
        stack.enter_context(stopping_when_asked(run, stop, say))
        with ExitStack() as inner:
            try:
                crew, mirror = _enter(config, run, console, swarm, stop, inner)
            except StopRequested:
                console.leave(STOPPING)
                stop.safe()
                return TrainResult(run.path, 0, False, Figures(), None)
            check_disk_room(crew.config, run, crew.parts.footprint, everybody=beside is not None)
            run.keep()
            say(_traffic(crew), "estimate")
            if beside is not None:
                command = crew.parts.join_command
                command.open = False
                inner.enter_context(beside(lambda: command.link, say))
            try:
                while True:
                    try:
                        if not console.following(partial(crew.follow, stop)):
                            break
                        crew.take_lead(stop)
                        with ExitStack() as leading:
                            private = beside is not None
                            of_run = crew.config, run, leading, stop, console
                            lead = Run(*of_run, crew=crew, private=private, callbacks=callbacks)
                            lead.train()
                        if not lead.finished:
                            crew.leaving.drain(stop)
                        crew.leaving.gather(stop)
                        if lead.finished:
                            crew.leaving.announce_end(crew.progress)
                        break
                    except Deposed:
                        stop.hold()
                        lead = None
                        crew.leave_lead()
            except StopRequested:
                console.leave(STOPPING)
            finally:  # the stages that are held here are not lost, whatever went wrong
                stop.hold()
                crew.leaving.close(stop)
            stop.safe()
            finish_mirror(mirror, stop)
        if lead is None:
            console.events.write("stop", "this node has left the crew")
            return callbacks.end(TrainResult(run.path, crew.progress.round, crew.parts.over, Figures(), None))
        report = lead.report()  # the swarm has been left
        report.draw()
        return callbacks.end(lead.result(report))


def _enter(
    config: NodeConfig, run: RunDir, console: Console, swarm: Swarm, stop: Stopper, stack: ExitStack
) -> tuple[CrewNode, Mirror | None]:
    """Join the swarm and the crew, and restore checkpoints from their copies. Raises StopRequested and UserError."""
    try:
        run.path.chmod(0o700)
    except OSError as error:
        say(Warned(f"users who can read {run.path} find the crew's name there: {error.strerror}"))
    entered = join_swarm(swarm, config, run, say, stack, stop.allowed)
    console.health.identify(config.name or run.path.resolve().name, entered.manifest.swarm_id)
    console.health.restarted = entered.transport.restarted
    fitting = entered.of_a_member(config)
    mirror = open_mirror(fitting, run, entered, stop, crew=True)
    crew = CrewNode(CrewParts(fitting, entered, run, say, stack, config), stack)
    crew.parts.run_settings.announce("from the next update of a stage here")
    console.progress.hint = "Ctrl-C saves and stops"
    console.progress.waiting, console.progress.crew = crew.waiting, partial(_others, crew)
    console.health.waiting = lambda: (
        crew.waiting() or ("" if crew.stage_transport.whole else "for the others of the crew")
    )
    say_reach(fitting, None)
    return crew, mirror


def _traffic(crew: CrewNode) -> str:
    """How much the stages of the crew send each other, as a sentence."""
    tasks, tokenizer = crew.parts.entered.tasks, load_tokenizer(crew.config.policy)
    drawn = tasks.sample(random.Random(0), PROMPTS_MEASURED)
    prompt = fmean(map(len, tokenizing.encode(tokenizer, list(map(tasks.prompt, drawn)), special=True)))
    positions = crew.parts.loading.config.get_text_config().max_position_embeddings
    longest = min(crew.config.rollouts.max_new_tokens, positions // 2)
    size = volume(crew.parts.footprint.traffic(prompt, longest))
    return f"each stage of the crew sends at most {size} a round, less with short answers (pipeline.wire = int8: half)"


def _others(crew: CrewNode) -> int | None:
    """The number of other nodes in the crew, as far as it is known. From any thread."""
    parts, plan = crew.parts, crew.stage_transport.plan
    return None if plan is None else len({*parts.status_text.holders, *plan.spares} - {parts.spec.me})
