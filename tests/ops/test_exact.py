"""`exact` means the bits of token-by-token decoding: every comparison here is torch.equal."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ops.backends import EXACT_PAIRS, Backend
from ops.cases import RECURRENCES, int32, path_to, random_parents
from ops.stepping import Layer
from specdec.ops import ConvPending, ConvPrefix, Factors, Pending, Prefix

pairs = pytest.mark.parametrize(("backend", "strategy"), EXACT_PAIRS)
recurrences = pytest.mark.parametrize(("gate", "update"), RECURRENCES)


@pairs
@recurrences
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_accepted_length(backend: Backend, strategy: str, gate, update, dtype: torch.dtype) -> None:
    """Every m of every T up to 16: outputs, the eager commit and the deferred commit."""
    layer = Layer.random(backend, strategy, 1, 17, gate=gate, update=update, dtype=dtype)
    stepper = layer.start()
    states, windows, outs, ys = [stepper.state.clone()], [stepper.window.clone()], [], []
    for token in range(17):
        out, y = stepper.step(token)
        outs.append(out), ys.append(y)
        states.append(stepper.state.clone()), windows.append(stepper.window.clone())
    for T in backend.some(range(1, 17)):
        # All accepted lengths at once: row m of the batch accepts m tokens.
        rows = T + 1
        ids = torch.arange(T).expand(rows, T)
        state, window = layer.state.repeat(rows, 1, 1, 1), layer.window.repeat(rows, 1, 1)
        out, factors = layer.verify(ids, state=state)
        y = layer.conv_verify(ids, conv_state=window)
        assert torch.equal(out, torch.stack(outs[:T]).expand_as(out))
        assert torch.equal(y, torch.stack(ys[:T]).expand_as(y))
        accepted = torch.arange(rows, dtype=torch.int32)
        x = layer.inputs(ids)[1]
        late, late_window = state.clone(), window.clone()
        backend.commit(state, factors, None, accepted)
        backend.conv_commit(window, x, None, accepted)
        assert torch.equal(state, torch.cat(states[:rows]))
        assert torch.equal(window, torch.cat(windows[:rows]))
        after, _ = layer.verify(accepted[:, None], state=late, pending=Pending(factors, None, accepted))
        after_y = layer.conv_verify(
            accepted[:, None], conv_state=late_window, pending=ConvPending(x, None, accepted)
        )
        assert torch.equal(late, state)
        assert torch.equal(late_window, window)
        assert torch.equal(after[:, 0], torch.stack(outs[:rows]))
        assert torch.equal(after_y[:, 0], torch.stack(ys[:rows]))


@pairs
@recurrences
@pytest.mark.parametrize("N", [3, 5])
def test_every_tree(backend: Backend, strategy: str, gate, update, N: int) -> None:
    """The N! topologically ordered forests of N nodes, one a row; every node is compared and committed."""
    forests = backend.some(list(p) for p in itertools.product(*[range(-1, i) for i in range(N)]))
    layer = Layer.random(backend, strategy, 2, N, gate=gate, update=update)
    steppers = {(): layer.start()}
    outs: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def decode(path: tuple[int, ...]) -> None:
        if path not in steppers:
            decode(path[:-1])
            steppers[path] = steppers[path[:-1]].copy()
            outs[path] = steppers[path].step(path[-1])

    rows = len(forests)
    state, window = layer.state.repeat(rows, 1, 1, 1), layer.window.repeat(rows, 1, 1)
    ids = torch.arange(N).expand(rows, N)
    out, factors = layer.verify(ids, state=state, parents=int32(forests))
    y = layer.conv_verify(ids, conv_state=window, parents=int32(forests))
    x = layer.inputs(ids)[1]
    for node in range(N):
        paths = [tuple(path_to(parents, node)) for parents in forests]
        for path in paths:
            decode(path)
        assert torch.equal(out[:, node], torch.stack([outs[path][0] for path in paths]))
        assert torch.equal(y[:, node], torch.stack([outs[path][1] for path in paths]))
        lengths = int32([len(path) for path in paths])
        padded = int32([[*path, *[0] * (N - len(path))] for path in paths])
        committed, moved = state.clone(), window.clone()
        backend.commit(committed, factors, padded, lengths)
        backend.conv_commit(moved, x, padded, lengths)
        assert torch.equal(committed, torch.cat([steppers[path].state for path in paths]))
        assert torch.equal(moved, torch.cat([steppers[path].window for path in paths]))


@pairs
def test_large_trees(backend: Backend, strategy: str) -> None:
    """64 nodes in random forests, against decoding the paths of some of them."""
    rng = torch.Generator().manual_seed(3)
    layer = Layer.random(backend, strategy, 4, 64, HK=2, HV=4, DK=64, DV=96)
    rows = backend.count(2)
    parents = random_parents(rng, rows, 64)
    out, _ = layer.verify(
        torch.arange(64).expand(rows, 64), state=layer.state.repeat(rows, 1, 1, 1), parents=parents
    )
    for row in range(rows):
        for node in backend.some(range(3, 64, 7)):
            want, _ = layer.start().run(path_to(parents[row].tolist(), node))
            assert torch.equal(out[row, node], want[-1])


@pairs
@recurrences
def test_every_split(backend: Backend, strategy: str, gate, update) -> None:
    """8 tokens in one round, in 3 + 5, in 1 + 1 + 6, ...: all 128 compositions, eager and deferred."""
    layer = Layer.random(backend, strategy, 5, 8, gate=gate, update=update)
    stepper = layer.start()
    want, want_y = stepper.run(list(range(8)))
    for cuts in backend.some(itertools.product([False, True], repeat=7)):
        ends = [i + 1 for i, cut in enumerate(cuts) if cut] + [8]
        state, window, late = layer.state.clone(), layer.window.clone(), layer.state.clone()
        pending: Pending | None = None
        begin = 0
        for end in ends:
            ids = torch.arange(begin, end)[None]
            out, factors = layer.verify(ids, state=state)
            y = layer.conv_verify(ids, conv_state=window)
            assert torch.equal(out[0], want[begin:end])
            assert torch.equal(y[0], want_y[begin:end])
            backend.commit(state, factors)
            backend.conv_commit(window, layer.inputs(ids)[1])
            late_out, late_factors = layer.verify(ids, state=late, pending=pending)
            assert torch.equal(late_out, out)
            pending = Pending(late_factors)
            begin = end
        assert torch.equal(state, stepper.state)
        assert torch.equal(window, stepper.window)
        assert pending is not None
        backend.commit(late, pending.factors)
        assert torch.equal(late, state)


@pairs
@recurrences
def test_prefix_equals_whole_tree(backend: Backend, strategy: str, gate, update) -> None:
    """A drafter's way: a tree verified a few nodes at a time over the frozen state, against one call."""
    N = 12
    layer = Layer.random(backend, strategy, 6, N, gate=gate, update=update)
    rng = torch.Generator().manual_seed(7)
    for parents in (None, random_parents(rng, 2, N)):
        state, window = layer.state.repeat(2, 1, 1, 1), layer.window.repeat(2, 1, 1)
        ids = torch.arange(N).expand(2, N)
        x = layer.inputs(ids)[1]
        whole, factors = layer.verify(ids, state=state, parents=parents)
        whole_y = layer.conv_verify(ids, conv_state=window, parents=parents)
        for cuts in backend.some([tuple(range(1, N)), (5,), (3, 11), (1, 2, 3, 4)]):
            begin = 0
            for end in (*cuts, N):
                new = slice(begin, end)
                some = None if parents is None else parents[:, new].contiguous()
                prefix = conv_prefix = None
                if begin:
                    before = Factors(*(None if t is None else t[:, :begin].contiguous() for t in factors))
                    old = None if parents is None else parents[:, :begin].contiguous()
                    prefix, conv_prefix = Prefix(before, old), ConvPrefix(x[:, :begin], old)
                out, fresh = layer.verify(ids[:, new], state=state, parents=some, prefix=prefix)
                assert torch.equal(out, whole[:, new])
                assert torch.equal(fresh.u, factors.u[:, new])
                y = layer.conv_verify(ids[:, new], conv_state=window, parents=some, prefix=conv_prefix)
                assert torch.equal(y, whole_y[:, new])
                begin = end
        assert torch.equal(state, layer.state.repeat(2, 1, 1, 1))


@pairs
def test_rows_do_not_know_each_other(
    backend: Backend, strategy: str, set_threads: Callable[[int], None]
) -> None:
    """A row's bits depend on nothing else: batch size, position, slot, neighbours, thread count."""
    B, N = 7, 6
    layer = Layer.random(backend, strategy, 8, B * N, HK=2, HV=4, DK=128, DV=128)
    ids = torch.arange(B * N).view(B, N)
    rng = torch.Generator().manual_seed(9)
    pool = torch.randn(B, *layer.state.shape[1:], generator=rng)
    parents = random_parents(rng, B, N)
    out, factors = layer.verify(ids, state=pool, parents=parents)
    for b in range(B):
        alone, alone_factors = layer.verify(ids[b : b + 1], state=pool[b : b + 1], parents=parents[b : b + 1])
        assert torch.equal(alone[0], out[b])
        assert torch.equal(alone_factors.u[0], factors.u[b])
    order = torch.randperm(B, generator=rng)
    set_threads(3)
    shuffled, _ = layer.verify(ids[order], state=pool, slots=order.int(), parents=parents[order])
    assert torch.equal(shuffled, out[order])
    committed, one_by_one = pool.clone(), pool.clone()
    backend.commit(committed, factors)
    set_threads(1)
    for b in range(B):
        backend.commit(one_by_one[b : b + 1], Factors(*(t if t is None else t[b : b + 1] for t in factors)))
    assert torch.equal(committed, one_by_one)


@pairs
@recurrences
def test_node_order(backend: Backend, strategy: str, gate, update) -> None:
    """One tree as drawn, depth first and breadth first: the same outputs."""
    N = 15
    layer = Layer.random(backend, strategy, 10, N, gate=gate, update=update)
    parents = random_parents(torch.Generator().manual_seed(11), 1, N)[0].tolist()
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)

    def depth_first(node: int) -> list[int]:
        return [
            node,
            *itertools.chain.from_iterable(depth_first(c) for c in reversed(children.get(node, []))),
        ]

    orders = [list(range(N)), depth_first(-1)[1:], sorted(range(N), key=lambda n: len(path_to(parents, n)))]
    results = []
    for order in orders:
        where = {node: i for i, node in enumerate(order)}
        renamed = int32([[where[parents[n]] if parents[n] >= 0 else -1 for n in order]])
        ids = torch.tensor([order])
        out, factors = layer.verify(ids, state=layer.state, parents=renamed)
        y = layer.conv_verify(ids, conv_state=layer.window, parents=renamed)
        back = torch.tensor([where[n] for n in range(N)])
        leaf = path_to(parents, N - 1)
        state = layer.state.clone()
        backend.commit(state, factors, int32([sorted(where[n] for n in leaf)]))
        results.append((out[:, back], y[:, back], factors.u[:, back], state))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pairs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bfloat16_state_deferred_equals_eager(backend: Backend, strategy: str, dtype: torch.dtype) -> None:
    """A bfloat16 state is rounded once a commit: splits differ, deferring still changes nothing."""
    layer = Layer.random(backend, strategy, 12, 9, dtype=dtype, state_dtype=torch.bfloat16, DK=96, DV=64)
    ids = torch.arange(5)[None]
    eager, late = layer.state.clone(), layer.state.clone()
    _, factors = layer.verify(ids, state=eager)
    backend.commit(eager, factors, None, int32([3]))
    out, _ = layer.verify(ids + 4, state=eager)
    late_out, _ = layer.verify(ids + 4, state=late, pending=Pending(factors, None, int32([3])))
    assert torch.equal(late, eager)
    assert torch.equal(late_out, out)


@pairs
def test_strategies_agree(backend: Backend, strategy: str) -> None:
    layer = Layer.random(backend, strategy, 13, 20, HK=2, HV=4, DK=192, DV=96)
    other = Layer(backend, "serial", *[getattr(layer, n) for n in list(Layer.__dataclass_fields__)[2:]])
    parents = random_parents(torch.Generator().manual_seed(14), 1, 20)
    ids = torch.arange(20)[None]
    for a, b in zip(
        layer.verify(ids, state=layer.state, parents=parents)[1],
        other.verify(ids, state=layer.state, parents=parents)[1],
        strict=True,
    ):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


_NARROWER = """
import sys; sys.path[:0] = {path!r}
import torch
from specdec.ops import cpu_isa
from ops.backends import CPU
from ops.test_exact import test_every_split, test_every_tree
assert cpu_isa() == {isa!r} or cpu_isa() == "portable", cpu_isa()
torch.set_num_threads(1)
test_every_tree(CPU, "serial", "head", "delta", 4)
test_every_split(CPU, "hybrid", "channel", "delta")
"""


@pytest.mark.parametrize("isa", ["avx2", "portable"])
def test_narrower_instruction_sets(isa: str) -> None:
    """The other builds keep the promise too, each for itself: between them bits may differ."""
    code = _NARROWER.format(path=[*sys.path, str(Path(__file__).resolve().parent.parent)], isa=isa)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "SPECDEC_CPU_ISA": isa},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
