"""Whole `CrewNode`s in one process, each on a thread of its own: the memory transport, on a clock that runs fast."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from torch import Tensor

from swarm_node.config import GrpoConfig, NodeConfig, PipelineConfig, PolicyConfig
from swarm_node.config.machine import CheckpointsConfig
from swarm_node.errors import StopRequested
from swarm_node.grpo.trainer import Trainer
from swarm_node.pipeline import assemble as assembling
from swarm_node.pipeline.assemble import CrewParts
from swarm_node.pipeline.crew import CrewNode, Deposed
from swarm_node.pipeline.transport import StageTransport
from swarm_node.runtime.shutdown import Stopper
from swarm_node.storage.rundir import RunDir
from swarm_node.swarm.join import JoinedSwarm
from swarm_node.swarm.manifests import make_manifest
from swarm_protocol.transports.memory import MemoryNetwork, VirtualClock
from tests.support.pipeline_crew import SAMPLING, some_groups
from tests.support.waiting import until

SPEED = 10.0
"""Seconds of the network in one of the test."""
MOST_S = 0.02
"""Of the test that pass at once: on a busy machine the network's time stands still while nobody can use it."""
PATIENCE_S = 100.0
"""Nothing takes so long, unless it hangs."""


class Locked:
    """Something of the memory network, which is not made for threads, used by one at a time."""

    def __init__(self, inner: Any, lock: threading.RLock) -> None:
        self._inner, self._lock = inner, lock

    def __getattr__(self, name: str) -> Any:
        with self._lock:
            value = getattr(self._inner, name)
        return partial(self._call, value, name) if callable(value) else value

    def _call(self, method: Callable[..., Any], name: str, *args: Any) -> Any:
        if name in ("listen", "connect"):
            opened = args[-1]
            args = (*args[:-1], lambda channel: opened(Locked(channel, self._lock)))
        with self._lock:
            made = method(*args)
        return Locked(made, self._lock) if name == "connect" else made


class Stop:
    """As `Stopper`, without signals."""

    requested = False
    advised = False
    left_s = 8.0

    def check(self) -> None:
        if self.requested:
            raise StopRequested

    allow = check

    def hold(self) -> None:
        pass


class Machine:
    """A node, and the thread that it lives on."""

    def __init__(self, world: CrewWorld, name: str, config: NodeConfig) -> None:
        self.world = world
        self.name = name
        self.said: list[str] = []
        self.stop = Stop()
        self.error: BaseException | None = None
        self.leads = False
        self.stack = ExitStack()
        run = self.stack.enter_context(RunDir.open(world.folder / name))
        with world.lock:
            known = [address for one in world.machines.values() for address in one.transport.addresses]
            transport = world.network.join(name, world.manifest.swarm_id, bootstrap=known)
        self.transport = Locked(transport, world.lock)
        entered = JoinedSwarm(world.manifest, cast(Any, None), self.transport, cast(Any, None))
        parts = CrewParts(config, entered, run, lambda text, kind="": self.said.append(text), self.stack)
        self.node = CrewNode(parts, self.stack)
        self.thread = threading.Thread(target=self._live, name=name, daemon=True)
        self.thread.start()

    def _live(self) -> None:
        stop = cast(Stopper, self.stop)
        try:
            while self.node.follow(stop):
                try:
                    self.node.take_lead(stop)
                    self._lead()
                except Deposed:
                    self.leads = False
                    self.node.leave_lead()
        except StopRequested:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.leads = False

    def _lead(self) -> None:
        node, world = self.node, self.world
        self.leads = True
        trainer = Trainer(node.policy, world.grpo, SAMPLING, self.said.append, optimizer=node.driver)
        while True:
            self.stop.check()
            if world.todo == 0:
                time.sleep(0.005)
                continue
            trainer.step(some_groups(world.done))
            node.round_over(node.progress.round + 1, 0.5, None)
            world.todo, world.done = world.todo - 1, world.done + 1

    @property
    def updates(self) -> dict[int, int]:
        return {stage: worker.updates for stage, worker in self.node.held_stages.workers.items()}

    def weights(self) -> dict[int, list[Tensor]]:
        return {
            stage: [tensor.detach().clone() for tensor in worker.stage.named().values()]
            for stage, worker in self.node.held_stages.workers.items()
        }

    def end(self, politely: bool = True) -> None:
        self.stop.requested = True
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive(), f"{self.name} does not end: {self.said}"
        if politely:
            self.node.leaving.close(cast(Stopper, self.stop))
        else:
            self.node.stage_transport.close()
        self.stack.close()
        self.transport.close()


class CrewWorld:
    """Machines of one crew."""

    def __init__(self, policy: PolicyConfig, stages: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.policy, self.stages, self.folder = policy, stages, folder
        self.grpo = GrpoConfig(learning_rate=1e-2, microbatch_tokens=4096)
        self.manifest = make_manifest("crews", ["small"])
        self.lock = threading.RLock()
        self.clock = VirtualClock(1000.0)
        self.network = MemoryNetwork(self.clock, seed=0)
        self.machines: dict[str, Machine] = {}
        self.todo = self.done = 0
        monkeypatch.setattr(assembling, "StageTransport", partial(StageTransport, now=self.clock.now))
        self._over = threading.Event()
        self._clock = threading.Thread(target=self._run, name="clock", daemon=True)
        self._clock.start()

    def _run(self) -> None:
        before = time.monotonic()
        while not self._over.wait(0.002):
            now = time.monotonic()
            with self.lock:
                self.clock.run_until(self.clock.now() + SPEED * min(now - before, MOST_S))
            before = now

    def config(self, name: str, **stages: Any) -> NodeConfig:
        asked: dict[str, Any] = {
            **dict(stages=self.stages, crew="home", wire="float32", replica="off", spare_wait_s=2.0, stall_s=60.0),
            **stages,
        }
        return NodeConfig(
            name=name,
            seed=0,
            swarm="crews",
            policy=self.policy,
            grpo=self.grpo,
            checkpoints=CheckpointsConfig(every=1000),
            pipeline=PipelineConfig(**asked),
        )

    def start(self, name: str, minutes: float | None = None, **stages: Any) -> Machine:
        config = self.config(name, **stages).model_copy(update={"minutes": minutes})
        self.machines[name] = Machine(self, name, config)
        return self.machines[name]

    def kill(self, name: str) -> Machine:
        """Without a goodbye; its thread still has to be ended."""
        with self.lock:
            self.network.kill(name)
        machine = self.machines.pop(name)
        machine.stop.requested = True
        return machine

    def until(self, true: Callable[[], object]) -> None:
        """Fails at once if a machine dies."""

        def while_all_live() -> bool:
            if true():
                return True
            for machine in self.machines.values():
                if machine.error is not None:
                    raise AssertionError(f"{machine.name} died: {machine.said}") from machine.error
            return False

        def said() -> str:
            return str({name: machine.said for name, machine in self.machines.items()})

        until(while_all_live, PATIENCE_S, said, pause_s=0.01)  # in which a tenth of a second of the network passes

    def train(self, updates: int) -> None:
        """Until the crew, whoever leads it, has made so many more."""
        self.todo = updates
        self.until(lambda: self.todo == 0)

    def lead(self) -> Machine:
        """Whoever leads, once somebody does and all stages are held."""
        self.until(lambda: any(machine.leads for machine in self.machines.values()))
        return next(machine for machine in self.machines.values() if machine.leads)

    def close(self) -> None:
        for machine in self.machines.values():
            machine.stop.requested = True
        for machine in self.machines.values():
            machine.end(politely=False)
        self._over.set()
        self._clock.join()
