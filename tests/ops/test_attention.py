"""`tree_attention` against float64, and against decoding token by token, bit for bit."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ops.attending import BLOCK, Tokens, random_attend
from ops.backends import BACKENDS, COMPILED, Backend
from ops.cases import NAN, assert_close, bits, int32, path_to, random_parents
from specdec import ops
from specdec.ops import attention_reference

backends = pytest.mark.parametrize("backend", BACKENDS)
compiled = pytest.mark.parametrize("backend", COMPILED)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


# --- against float64 ---


@backends
@dtypes
@pytest.mark.parametrize("NP", [0, 7])
def test_random_shapes(backend: Backend, dtype: torch.dtype, NP: int) -> None:
    shapes = [
        (1, 1, 1, 1, 16), (2, 1, 9, 3, 64), (3, 5, 6, 2, 32), (4, 17, 8, 8, 48), (2, 33, 5, 1, 80),
        (3, 12, 12, 4, 128), (2, 3, 2, 1, 256), (2, 9, 70, 1, 16), (1, 64, 4, 2, 112),
    ]  # fmt: skip
    rng = torch.Generator().manual_seed(1)
    for seed, (B, N, HQ, HK, D) in enumerate(backend.some(shapes)):
        room = int(torch.randint(1, 3 * BLOCK, (1,), generator=rng))
        case = random_attend(
            seed, B=B, N=N, HQ=HQ, HK=HK, D=D, NP=NP, room=room, dtype=dtype, tree=seed % 3 > 0
        )
        want = case.run(attention_reference.tree_attention, dtype=torch.float64).to(dtype)
        out = case.run(backend.tree_attention)
        assert out.dtype == dtype
        assert out.is_contiguous()
        assert_close(out, want, case.tolerance(want), f"out of {(B, N, HQ, HK, D)}")


@backends
@pytest.mark.parametrize("committed", [0, 1, BLOCK - 9, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 3])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_block_boundaries(backend: Backend, committed: int, tree: bool) -> None:
    """Blocks that lie in the cache, in both, in the tree alone."""
    case = random_attend(
        2, B=2, N=20, room=2 * BLOCK, NP=3, tree=tree, lengths_of_slots=[committed] * 4, ragged=False
    )
    want = case.run(attention_reference.tree_attention, dtype=torch.float64).float()
    assert_close(case.run(backend.tree_attention), want, case.tolerance(want), "out")


@backends
def test_a_path_of_several_blocks(backend: Backend) -> None:
    """As many nodes as a call takes, in one chain."""
    case = random_attend(3, B=1, N=200, HQ=2, HK=1, NP=56, room=300, tree=False, lengths_of_slots=[290] * 3)
    want = case.run(attention_reference.tree_attention, dtype=torch.float64).float()
    assert_close(case.run(backend.tree_attention), want, case.tolerance(want), "out")


@backends
@pytest.mark.parametrize("scale", [0.0, 0.37, -1.0])
def test_scale(backend: Backend, scale: float) -> None:
    case = random_attend(4)
    want = case.run(attention_reference.tree_attention, dtype=torch.float64, scale=scale).float()
    case.named["scale"] = scale
    assert_close(case.run(backend.tree_attention), want, abs(case.tolerance(want)), "out")


@backends
def test_large_scores(backend: Backend) -> None:
    """Scores of thousands: one key has all the weight, wherever it stands, and nothing overflows."""
    tokens = Tokens(backend, 5, 400, HQ=1, D=64)
    cache = tokens.cache([list(range(300))], 300)
    for key in (0, 100, BLOCK, 299, 300):
        table = cache.k[0, 0] if key < 300 else tokens.k[:, 0]
        before = table[key].clone()
        table[key] = tokens.q[300, 0] * 1e3
        want = cache.v[0, 0, key] if key < 300 else tokens.v[key, 0]
        torch.testing.assert_close(tokens.attend(int32([[300]]), cache)[0, 0, 0], want, rtol=0, atol=1e-6)
        table[key] = before


@backends
def test_no_rows_no_nodes_no_cache(backend: Backend) -> None:
    for B, N, room in [(0, 4, 5), (3, 0, 5), (2, 3, 0)]:
        case = random_attend(6, B=B, N=N, room=room, ragged=False)
        want = case.run(attention_reference.tree_attention)
        torch.testing.assert_close(case.run(backend.tree_attention), want)
    case = random_attend(6, B=2, N=3, NP=1, ragged=False)
    none = {name: case.named[name][:, :0] for name in ("prefix_k", "prefix_v", "prefix_parents")}
    case.named["parents"] = None
    without = dict.fromkeys(none)
    assert torch.equal(case.run(backend.tree_attention, **none), case.run(backend.tree_attention, **without))


@backends
def test_what_is_not_a_number_reaches_descendants_alone(backend: Backend) -> None:
    tokens = Tokens(backend, 7, 40)
    parents = [-1, 0, 0, 1, 2, 2]
    for committed in (10, BLOCK - 2):  # all nodes in one block, and in two
        cache = tokens.cache([[i % 30 for i in range(committed)]], committed)
        ids = torch.arange(6)[None] + 30
        want = tokens.attend(ids, cache, parents=int32([parents]))[0]
        for table in (tokens.k, tokens.v):
            before = table[32].clone()
            table[32] = NAN
            out = tokens.attend(ids, cache, parents=int32([parents]))[0]
            table[32] = before
            below = [2 in path_to(parents, node) for node in range(6)]
            for node in range(6):
                assert out[node].isnan().all() if below[node] else torch.equal(out[node], want[node])


# --- the rotation ---


@dtypes
@pytest.mark.parametrize("D", [2, 6, 16, 30, 64, 80, 256])
def test_rotate_heads(dtype: torch.dtype, D: int) -> None:
    """The bits of plain code: a slice of a projection; a rotation a node, one for all rows, one for all."""
    rng = torch.Generator().manual_seed(D)
    x = torch.randn(3, 5, 9, D + 1, generator=rng).to(dtype)[:, :, 2:, :D]
    rotation = torch.randn(3, 5, 2, D, generator=rng)
    for turn in (rotation, rotation[:1].expand(3, -1, -1, -1), rotation[:1, :1].expand(3, 5, 2, D)):
        out = ops.rotate_heads(x, turn)
        assert out.is_contiguous()
        assert torch.equal(bits(out), bits(attention_reference.rotate_heads(x, turn)))
    assert ops.rotate_heads(x[:0], rotation[:0]).shape == (0, 5, 7, D)


def test_rotation_turns_by_differences() -> None:
    """The product of a query and a key depends on how far apart their positions are."""
    angles = torch.arange(40.0)[:, None] * torch.tensor([0.3, 0.01])  # [positions, D / 2]
    cos, sin = angles.cos().repeat(1, 2), torch.cat([-angles.sin(), angles.sin()], dim=-1)
    rotation = torch.stack([cos, sin], dim=1)[None]  # [1, positions, 2, D]
    rng = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 1, 1, 1, 4, generator=rng).expand(-1, -1, 40, -1, -1)
    products = (ops.rotate_heads(q, rotation)[0, 3:, 0] * ops.rotate_heads(k, rotation)[0, :-3, 0]).sum(-1)
    # Sums of four products of rotated numbers, whose angles are rounded too, at up to 12 radians.
    assert_close(products, products[:1].expand(37), 1e-5, "products of positions three apart")


# --- to the bit ---


SPLITS = [
    (torch.float32, 0),
    (torch.float16, 30),
    (torch.float32, BLOCK - 5),
    (torch.bfloat16, BLOCK),
    (torch.float32, 2 * BLOCK - 9),
]


@compiled
@pytest.mark.parametrize(("dtype", "before"), SPLITS, ids=str)
def test_every_split(backend: Backend, dtype: torch.dtype, before: int) -> None:
    """A chain of 24 tokens in rounds of any size, below a prefix or committed after every round."""
    tokens = Tokens(backend, 8, before + 24, D=48, dtype=dtype)
    context, chain = list(range(before)), list(range(before, before + 24))
    want = tokens.decode(context, chain)
    for sizes in backend.some([[24], [1, 23], [8, 16], [3, 5, 7, 9], [23, 1]]):
        cache = tokens.cache([context], before + 24)
        kept = tokens.cache([context], before)  # nothing is ever committed to it
        done = 0
        for size in sizes:
            ids = torch.tensor([chain[done : done + size]])
            earlier = torch.tensor([chain[:done]], dtype=torch.int64)
            prefix = {"prefix_k": tokens.k[earlier], "prefix_v": tokens.v[earlier]}
            for out in (tokens.attend(ids, cache), tokens.attend(ids, kept, **prefix)):
                assert torch.equal(bits(out[0]), bits(want[done : done + size]))
            for token in chain[done : done + size]:
                cache.append(0, tokens.k[token], tokens.v[token])
            done += size


@compiled
@pytest.mark.parametrize("before", [0, BLOCK - 2])
def test_every_tree(backend: Backend, before: int) -> None:
    """The 24 topologically ordered forests of four nodes, one a row, every node against decoding its path."""
    forests = backend.some(list(p) for p in itertools.product(*[range(-1, i) for i in range(4)]))
    tokens = Tokens(backend, 9, before + 4)
    context = list(range(before))
    cache = tokens.cache([context] * len(forests), before)
    ids = (torch.arange(4) + before).expand(len(forests), 4)
    out = tokens.attend(ids, cache, parents=int32(forests))
    for row, parents in enumerate(forests):
        for node in range(4):
            path = [before + i for i in path_to(parents, node)]
            assert torch.equal(bits(out[row, node]), bits(tokens.decode(context, path)[-1]))


TREES = [(torch.float32, 9, 3, 64), (torch.bfloat16, 8, 1, 128), (torch.float16, 2, 2, 80)]


@compiled
@pytest.mark.parametrize(("dtype", "HQ", "HK", "D"), TREES)
def test_large_trees(backend: Backend, dtype: torch.dtype, HQ: int, HK: int, D: int) -> None:
    """A random forest, half of it as a prefix too, against decoding some of the paths."""
    rng = torch.Generator().manual_seed(10)
    N = 64 if backend.share == 1 else 24
    for before in backend.some([2 * BLOCK + 3, 17, BLOCK - 10]):
        tokens = Tokens(backend, 11, before + N, HQ=HQ, HK=HK, D=D, dtype=dtype)
        context = list(range(before))
        cache = tokens.cache([context], before + 9)
        parents = random_parents(rng, 1, N)
        ids = torch.arange(N)[None] + before
        out = tokens.attend(ids, cache, parents=parents)
        first, second = ids[:, : N // 2], ids[:, N // 2 :]
        below = tokens.attend(
            second,
            cache,
            parents=parents[:, N // 2 :].contiguous(),
            prefix_k=tokens.k[first],
            prefix_v=tokens.v[first],
            prefix_parents=parents[:, : N // 2].contiguous(),
        )
        assert torch.equal(bits(below), bits(out[:, N // 2 :]))
        for node in backend.some(range(3, N, 12)):
            path = [before + i for i in path_to(parents[0].tolist(), node)]
            assert torch.equal(bits(out[0, node]), bits(tokens.decode(context, path)[-1]))


@compiled
def test_rows_do_not_mind_each_other(backend: Backend) -> None:
    """A row alone, with others, in another slot, in a cache of another size, nodes in another order."""
    rng = torch.Generator().manual_seed(12)
    tokens = Tokens(backend, 13, 900, HQ=4, HK=2)
    lengths = [3, 250, 0, 500, 256]
    contexts = [torch.randint(0, 900, (n,), generator=rng).tolist() for n in lengths]
    N = 15
    ids = torch.randint(0, 900, (5, N), generator=rng)
    parents = random_parents(rng, 5, N)
    out = tokens.attend(ids, tokens.cache(contexts, 512), parents=parents)
    backwards = tokens.cache(contexts[::-1], 700)
    turned = tokens.attend(ids, backwards, parents=parents, slots=int32([4, 3, 2, 1, 0]))
    assert torch.equal(bits(turned), bits(out))
    for row in range(5):
        alone = tokens.cache([contexts[row]], len(contexts[row]))
        single = tokens.attend(ids[row : row + 1], alone, parents=parents[row : row + 1])
        assert torch.equal(bits(single[0]), bits(out[row]))
        order = _another_order(rng, parents[row].tolist())
        moved = [order.index(p) if p >= 0 else -1 for p in (int(parents[row, node]) for node in order)]
        shuffled = tokens.attend(ids[row : row + 1, order], alone, parents=int32([moved]))
        assert torch.equal(bits(shuffled[0]), bits(out[row, order]))


def _another_order(rng: torch.Generator, parents: list[int]) -> list[int]:
    """A random topological order of a forest."""
    order: list[int] = []
    while len(order) < len(parents):
        ready = [i for i, p in enumerate(parents) if i not in order and (p < 0 or p in order)]
        order.append(ready[int(torch.randint(0, len(ready), (1,), generator=rng))])
    return order


@compiled
def test_padding_is_not_inspected(backend: Backend) -> None:
    wild = int32([[1 << 30] * 3, [-1, 0, 1]])
    tokens = Tokens(backend, 14, 20)
    cache = tokens.cache([list(range(5)), list(range(9))], 9)
    cache.lengths[1] = 1 << 30
    out = tokens.attend(torch.tensor([[9, 10, 11]] * 2), cache, parents=wild, slots=int32([-1, 0]))
    assert (out[0] == 0).all()
    assert torch.equal(out[1], tokens.decode(list(range(5)), [9, 10, 11]))


@pytest.mark.parametrize("N", [1, 13])
@dtypes
def test_threads_change_no_bit(N: int, dtype: torch.dtype, set_threads) -> None:
    case = random_attend(15, B=3, N=N, HQ=9, HK=3, D=64, room=900, dtype=dtype)
    set_threads(1)
    want = case.run(ops.tree_attention)
    set_threads(2)
    for _ in range(3):
        assert torch.equal(bits(case.run(ops.tree_attention)), bits(want))


_NARROWER = """
import sys; sys.path[:0] = {path!r}
import torch
from specdec.ops import cpu_isa
from ops.backends import CPU
from ops import test_attention as tests
assert cpu_isa() == {isa!r} or cpu_isa() == "portable", cpu_isa()
tests.test_random_shapes(CPU, torch.float32, 7)
tests.test_every_split(CPU, torch.bfloat16, 251)
tests.test_every_tree(CPU, 254)
for D in (6, 64):
    tests.test_rotate_heads(torch.bfloat16, D)
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
