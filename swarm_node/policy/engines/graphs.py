"""The native engine on a GPU: the same tokens, but every step is recorded once as a CUDA graph and then replayed.

    one step:   sample -> record the token -> all layers -> logits of the next token

Python needs many times as long to launch the operations of such a step as a GPU needs to run them. A graph launches
all at once. It needs tensors whose shapes and addresses stay:
- a completion's keys and values have room for `ROOM` tokens at first and for twice as many whenever that is full. All
  of the room takes part in attention, behind a mask;
- the number of the step is a tensor, and rows that have ended go on as if they had not: nothing is read from them;
- nothing waits for the device: which rows still live is copied to the host every `LOOK` steps and read at the next
  look. The grid shrinks to its live rows when half of its cells are free.

A graph is good for one shape of grid and room in one round; recording one takes as long as an ordinary step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress

import torch
from torch import Tensor
from torch.nn.functional import pad

from swarm_node.policy.engines.base import Cancelled, Completion, sample
from swarm_node.policy.engines.native import Cache, Decoder, NativeEngine, compaction, picked
from swarm_node.types import Sampling

ROOM = 64
LOOK = 8
SHRINK_BELOW = 0.5
"""Share of the grid's cells. A step with half of the rows takes nearly as long, since the weights are read anyway."""


class GraphEngine(NativeEngine):
    """`NativeEngine` with one graph a step. On a CPU the same steps run one operation after the other."""

    @torch.inference_mode()
    def decode(
        self, prompts: list[list[int]], n: int, sampling: Sampling, uniform: Tensor, cancelled: Cancelled
    ) -> list[Completion]:
        batch = Batch(self.decoder, prompts, n, sampling, uniform, self._eos)
        step = 0
        while step < sampling.max_new_tokens and batch.live.numel():
            batch.make_room(step)
            steps = min(LOOK, batch.cache.room - step, sampling.max_new_tokens - step)
            batch.run(steps)
            step += steps
            if gone := cancelled():
                batch.drop(gone)
            if not batch.shrink():
                break
        return batch.samples()


def aligned(length: int) -> int:
    """`length` rounded up: products of matrices whose rows begin at odd places are slow."""
    return -(-length // 8) * 8


class StaticCache(Cache):
    """A `Cache` of which a step is the same operations on the same tensors, whatever its number."""

    def prefill(self, x: Tensor) -> Tensor:
        x = super().prefill(pad(x, (0, 0, 0, aligned(x.shape[1]) - x.shape[1])))
        for tensor in (*self.keys, *self.values):
            tensor.zero_()  # a masked NaN would still be a NaN
        self.places = torch.arange(self.room, device=x.device)
        return x

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        """Run completion token number `step` [1] of each row, [P*G, hidden], through the layers."""
        unwritten = torch.zeros(self.room, dtype=x.dtype, device=x.device)
        unwritten.masked_fill_(self.places > step, float("-inf"))
        prompt = self.prompt_mask
        self.mask = torch.cat([prompt, unwritten.expand(*prompt.shape[:-1], -1)], -1)  # [P, 1, 1, T + room]
        return super().forward(x, step)

    def attend(self, i: int, q: Tensor, k: Tensor, v: Tensor, step: Tensor) -> Tensor:
        """As the parent's, in ten operations: scores of prompt and completion are made side by side in one tensor."""
        (p, heads, g, rep, width), t, scale = q.shape, self.prompt_mask.shape[-1], self.slice.head_dim**-0.5
        keys, values = self.keys[i], self.values[i]
        keys.index_copy_(3, step, k[:, :, :, None])
        values.index_copy_(3, step, v[:, :, :, None])
        q = q.reshape(p * heads * g, rep, width)
        score = q.new_empty(p * heads, g * rep, t + self.room)
        shared, own = score[..., :t], score[..., t:].view(p * heads * g, rep, self.room)
        prompt = self.prompt_keys[i].flatten(0, 1)
        torch.baddbmm(shared, q.view(p * heads, g * rep, width), prompt, beta=0, alpha=scale, out=shared)
        torch.baddbmm(own, q, keys.flatten(0, 2).transpose(1, 2), beta=0, alpha=scale, out=own)
        score.view(p, heads, g * rep, -1).add_(self.mask)
        score = score.softmax(-1)  # in float32 inside
        a = torch.bmm(score[..., :t], self.prompt_values[i].flatten(0, 1)).view_as(q)
        own = score[..., t:].view(p * heads * g, rep, self.room)
        return a.baddbmm_(own, values.flatten(0, 2)).view(p, heads, g, rep, width)

    def grow(self) -> None:
        """Room for twice as many tokens, but for no more than there can be."""
        room = min(2 * self.room, aligned(self.limit))
        for tensors in (self.keys, self.values):
            for i, old in enumerate(tensors):
                tensors[i] = pad(old, (0, 0, 0, room - self.room))
        self.room = room
        self.places = torch.arange(room, device=self.places.device)


class Batch:
    """The completions of some prompts, in tensors whose addresses stay from step to step."""

    def __init__(
        self, decoder: Decoder, prompts: list[list[int]], n: int, sampling: Sampling, uniform: Tensor, eos: Tensor
    ) -> None:
        self.device = device = decoder.embed.weight.device
        rows, limit = len(prompts) * n, sampling.max_new_tokens
        self.decoder, self.n, self.sampling = decoder, n, sampling
        self.uniform, self.eos = uniform.to(device), eos.to(device)
        self.cache = StaticCache(decoder.slice, [len(p) for p in prompts], n, limit, min(ROOM, aligned(limit)))
        self.logits = decoder.prefill(self.cache, prompts).repeat_interleave(n, 0)
        self.step = torch.zeros(1, dtype=torch.long, device=device)
        self.origin = torch.arange(rows, device=device)  # [P*G] number of the completion in each cell of the grid
        self.live = torch.ones(len(prompts), n, dtype=torch.bool, device=device)
        self.tokens = torch.zeros(rows, limit, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(rows, limit, device=device)
        self.lengths = torch.full((rows,), limit, device=device)
        self.finished = torch.zeros(rows, dtype=torch.bool, device=device)
        self._graph: Callable[[], None] | None = None
        self._seen: tuple[Tensor, Callable[[], None]] | None = None

    def advance(self) -> None:
        """Sample a token of each row, record it, and compute the logits of the next one."""
        token, logprob = sample(self.logits, self.uniform[self.origin, self.step], self.sampling)
        self.tokens[self.origin, self.step], self.logprobs[self.origin, self.step] = token, logprob
        ended = self.live.flatten() & (token[:, None] == self.eos).any(1)
        self.lengths[self.origin] = torch.where(ended, self.step + 1, self.lengths[self.origin])
        self.finished[self.origin] = self.finished[self.origin] | ended
        self.live &= ~ended.view_as(self.live)
        self.logits.copy_(self.decoder.head(self.cache.forward(self.decoder.embed(token), self.step)))
        self.step += 1

    def run(self, steps: int) -> None:
        """Make so many steps. Of a new shape the first one is made as usual, and recorded for those after it."""
        if self._graph is None:
            self.advance()
            steps -= 1
            self._graph = self._recorded()
        for _ in range(steps):
            self._graph()

    def _recorded(self) -> Callable[[], None]:
        if self.device.type != "cuda":
            return self.advance
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # other threads may use the device meanwhile
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self.advance()
            except BaseException:
                with suppress(RuntimeError):  # of the same failure
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph.replay

    def make_room(self, step: int) -> None:
        """See that token number `step` has a place."""
        if step == self.cache.room:
            self.cache.grow()
            self._graph = None

    def drop(self, prompts: Collection[int]) -> None:
        """Leave the completions of these prompts as they are before the next token."""
        gone = torch.isin(self.origin // self.n, torch.tensor([*prompts], device=self.device)) & self.live.flatten()
        self.lengths[self.origin] = torch.where(gone, self.step, self.lengths[self.origin])
        self.live &= ~gone.view_as(self.live)

    def shrink(self) -> bool:
        """Shrink the grid to the rows that lived at the last look, if that frees enough; whether any row lived."""
        seen, self._seen = self._seen, self._copied()
        if seen is None:
            return True
        live, wait = seen
        wait()
        if not live.any():
            return False
        kept = compaction(live, SHRINK_BELOW)
        if kept is not None:
            alive, column = (x.to(self.device) for x in kept)
            width = live.shape[1]
            self.origin, self.logits = (picked(x, width, alive, column) for x in (self.origin, self.logits))
            self.live = self.live[alive].gather(1, column)
            self.cache.pick(alive, column)
            self._graph = self._seen = None
        return True

    def _copied(self) -> tuple[Tensor, Callable[[], None]]:
        """A copy of `live` on the host, and what waits until it is there."""
        if self.device.type != "cuda":
            return self.live.clone(), lambda: None
        copy = torch.empty(self.live.shape, dtype=torch.bool, pin_memory=True)
        copy.copy_(self.live, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return copy, event.synchronize

    def samples(self) -> list[Completion]:
        """All completions in order."""
        lengths = self.lengths.tolist()
        longest = max(lengths, default=0)
        tokens, logprobs = self.tokens[:, :longest].tolist(), self.logprobs[:, :longest].tolist()
        ends = zip(lengths, self.finished.tolist(), strict=True)
        return [(tokens[i][:length], logprobs[i][:length], done) for i, (length, done) in enumerate(ends)]
