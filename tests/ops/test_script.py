"""A random script of 300 rounds: what happens to a batch of sequences in a server, in any order."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ops.backends import COMPILED, EXACT_PAIRS, Backend
from ops.cases import EPS, NAN, assert_close, int32, tolerance
from ops.stepping import Layer, Stepper
from specdec.ops import ConvPending, Pending, reference

ROUNDS, SLOTS, TOKENS = 300, 7, 60


@dataclass
class Sequence:
    """A live sequence: the slot it lives in and its shadow, decoded token by token."""

    slot: int
    shadow: Stepper


class Server:
    """Slots of one layer, and rounds over them: verify ragged trees, accept, commit now or later."""

    def __init__(self, layer: Layer, seed: int) -> None:
        self.layer = layer
        self.random = random.Random(seed)
        self.state = torch.full((SLOTS, *layer.state.shape[1:]), NAN)
        self.window = torch.full((SLOTS, *layer.window.shape[1:]), NAN)
        self.live: list[Sequence] = []
        self.batch: list[Sequence | None] = []  # rows of the pending round; None is padding
        self.pending: tuple[Pending, ConvPending] | None = None

    @property
    def slots(self) -> Tensor:
        return int32([-1 if s is None else s.slot for s in self.batch])

    def admit(self) -> None:
        free = sorted(set(range(SLOTS)) - {s.slot for s in self.live})
        slot = self.random.choice(free)
        self.state[slot], self.window[slot] = self.layer.state[0], self.layer.window[0]
        self.live.append(Sequence(slot, self.layer.start()))

    def finish(self) -> Sequence:
        """The slot goes back poisoned: whoever still reads it shows."""
        done = self.live.pop(self.random.randrange(len(self.live)))
        check = (self.state[done.slot].clone(), self.window[done.slot].clone())
        self.state[done.slot], self.window[done.slot] = NAN, NAN
        assert torch.equal(check[0], done.shadow.state[0])
        assert torch.equal(check[1], done.shadow.window[0])
        return done

    def flush(self) -> None:
        if self.pending is None:
            return
        (factors, path, lengths), (x, _, _) = self.pending
        self.layer.backend.commit(self.state, factors, path, lengths, slots=self.slots)
        self.layer.backend.conv_commit(self.window, x, path, lengths, slots=self.slots)
        self.pending = None

    def shuffle(self) -> None:
        """Another batch: sequences come, go and change rows, some sit out, some rows are padding."""
        self.flush()
        chance = self.random
        if self.live and chance.random() < 0.15:
            self.finish()
        while len(self.live) < 2 or (len(self.live) < SLOTS - 1 and chance.random() < 0.4):
            self.admit()
        rows: list[Sequence | None] = [s for s in self.live if chance.random() < 0.8]
        rows += [None] * chance.randrange(3)
        chance.shuffle(rows)
        self.batch = rows or [self.live[0]]

    def round(self) -> None:
        if self.pending is None or self.random.random() < 0.5:
            self.shuffle()
        B = len(self.batch)
        trees = [self.draft() for _ in self.batch]
        N = max(len(tree) for tree in trees)
        parents = torch.full((B, N), 1 << 30, dtype=torch.int32)
        ids = torch.zeros(B, N, dtype=torch.int64)
        for b, tree in enumerate(trees):
            parents[b, : len(tree)] = int32(tree)
            ids[b, : len(tree)] = torch.tensor([self.random.randrange(TOKENS) for _ in tree])
        if self.random.random() < 0.15:  # a row that sits this round out, with nothing to verify
            trees[0] = []
        lengths = int32([len(tree) for tree in trees])
        pending, conv_pending = self.pending if self.pending is not None else (None, None)
        how = {"slots": self.slots, "parents": parents, "lengths": lengths}
        out, factors = self.layer.verify(ids, state=self.state, pending=pending, **how)
        y = self.layer.conv_verify(ids, conv_state=self.window, pending=conv_pending, **how)
        path, path_lengths = self.accept(trees, ids, out, y)
        x = self.layer.inputs(ids)[1]
        self.pending = (Pending(factors, path, path_lengths), ConvPending(x, path, path_lengths))
        if self.random.random() < 0.5:
            self.flush()

    def draft(self) -> list[int]:
        """Parents of one row: a plain step, a chain or a tree."""
        n = self.random.choice([1, 1, 2, 4, 7, 11])
        if self.random.random() < 0.5:
            return list(range(-1, n - 1))
        return [-1] + [self.random.randrange(i) for i in range(1, n)]

    def accept(self, trees: list[list[int]], ids: Tensor, out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """A random path of every row, checked against the shadow, which decodes it token by token."""
        paths: list[list[int]] = []
        for b, (sequence, tree) in enumerate(zip(self.batch, trees, strict=True)):
            path: list[int] = []
            if sequence is not None and tree and self.random.random() < 0.9:
                path = [self.random.randrange(len(tree))]
                while tree[path[0]] >= 0:
                    path.insert(0, tree[path[0]])
                want, want_y = sequence.shadow.run(ids[b, path].tolist())
                assert torch.equal(out[b, path], want)
                assert torch.equal(y[b, path], want_y)
            paths.append(path)
        longest = max(1, *map(len, paths))
        padded = int32([[*path, *[1 << 30] * (longest - len(path))] for path in paths])
        return padded, int32([len(path) for path in paths])


@pytest.mark.parametrize(("backend", "strategy"), EXACT_PAIRS)
def test_random_script(backend: Backend, strategy: str) -> None:
    layer = Layer.random(backend, strategy, 1, TOKENS, HK=1, HV=2, DK=32, DV=32)
    server = Server(layer, seed=2)
    for _ in range(backend.count(ROUNDS)):
        server.round()
    server.flush()
    assert server.live
    for sequence in server.live:
        shadow = sequence.shadow
        assert torch.equal(server.state[sequence.slot], shadow.state[0])
        assert torch.equal(server.window[sequence.slot], shadow.window[0])
        tokens, _ = layer.inputs(torch.tensor([shadow.ids]))
        state = layer.state.double()
        reference.prefill(*tokens, state=state, qk_l2norm=True, dtype=torch.float64)
        atol = tolerance(torch.float32, len(shadow.ids), 32, state, state)
        assert_close(shadow.state, state, atol, "state")


@pytest.mark.parametrize("backend", COMPILED)
def test_fast_drift(backend: Backend, record_property, capsys: pytest.CaptureFixture[str]) -> None:
    """Up to 2000 rounds of `solve` and closed-form commits against float64: the error does not grow.

    The gates forget: with mean decay a over the tokens an error lives about 1 / (1 - a) tokens, so the drift
    is bounded by the roundings of that many steps, however many rounds there are. The bound below takes the
    slowest head's mean gate.
    """
    if "solve" not in backend.strategies:
        pytest.skip("no solve strategy")
    rounds, n, DK = backend.count(2000), 3, 32
    layer = Layer.random(backend, "solve", 3, 97, HK=1, HV=1, DK=DK, DV=32)
    g = layer.tokens[3]
    assert g is not None
    slowest = float(g.mean(dim=(0, 1)).max())  # mean log-decay of a token
    memory = math.ceil(1 / -math.expm1(slowest))
    state, exact = layer.state.clone(), layer.state.double()
    drift = {}
    rng = random.Random(4)
    for i in range(1, rounds + 1):
        ids = torch.tensor([[rng.randrange(97) for _ in range(n)]])
        accepted = int32([rng.randrange(1, n + 1)])
        _, factors = layer.verify(ids, state=state)
        backend.commit(state, factors, None, accepted, mode="fast")
        tokens, _ = layer.inputs(ids)
        _, want = reference.verify(*tokens, state=exact, qk_l2norm=True, dtype=torch.float64)
        reference.commit(exact, want, None, accepted, dtype=torch.float64)
        if i in (1, 10, 100, 1000, rounds):
            drift[i] = float((state - exact).norm() / exact.norm())
    roundings = 2 * (DK / 4 + 4) + 8
    bound = 0.5 * EPS[torch.float32] * roundings * (memory + n)
    record_property("fast_drift", drift)
    with capsys.disabled():
        values = ", ".join(f"{i}: {value:.1e}" for i, value in drift.items())
        print(f"\nfast mode, relative state error after rounds {values}; bound {bound:.1e}")
    assert max(drift.values()) <= bound
