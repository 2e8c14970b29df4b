"""The cache of a hybrid model: recurrent layers and attention layers of two sizes, committed together."""

from __future__ import annotations

import random
from copy import deepcopy

import pytest
import torch
from torch import Tensor

from specdec import ops
from specdec.cache import (
    DecodingCache,
    KVEntries,
    KVSpec,
    LayerEntries,
    LayerFactors,
    LayerSpec,
    Round,
    Steps,
    path_tensor,
)
from specdec.ops import Factors

RECURRENT = LayerSpec(heads=2, value_dim=32, key_dim=32, conv_channels=10, conv_width=4)
PLAIN = LayerSpec(heads=1, value_dim=32, key_dim=64)
NARROW, WIDE = KVSpec(heads=1, head_dim=5), KVSpec(heads=3, head_dim=8)
MIXED = (NARROW, RECURRENT, WIDE, PLAIN, NARROW, WIDE)
SLOTS = 4
NAN = float("nan")


def int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def entries_of(spec: LayerSpec | KVSpec, B: int, N: int, rng: torch.Generator) -> LayerEntries:
    """Random entries; keys and values are slices of one wider tensor, as a projection makes them."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    if isinstance(spec, KVSpec):
        both = randn(B, N, 2, spec.heads, spec.head_dim)
        return KVEntries(both[:, :, 0], both[:, :, 1])
    factors = Factors(
        randn(B, N, spec.heads, spec.key_dim),
        randn(B, N, spec.heads, spec.value_dim),
        -randn(B, N, spec.heads).abs(),
    )
    return LayerFactors(factors, randn(B, N, spec.conv_channels) if spec.conv_channels else None)


def random_round(
    slots: list[int], N: int, seed: int, *, specs: tuple[LayerSpec | KVSpec, ...] = MIXED, tree: bool = True
) -> Round:
    rng = torch.Generator().manual_seed(seed)
    parents = int32([[i - 1 for i in range(N)]] * len(slots)) if tree else None
    return Round(tuple(entries_of(s, len(slots), N, rng) for s in specs), int32(slots), parents, N)


class Shadow:
    """Keys and values in Python lists; recurrent layers, committed by the operators one token at a time."""

    def __init__(self) -> None:
        self.rows = [[([], []) for _ in range(SLOTS)] for _ in MIXED]
        self.cache = DecodingCache([s for s in MIXED if isinstance(s, LayerSpec)], SLOTS)

    def commit(self, round: Round, paths: list[list[int]]) -> None:
        recurrent = 0
        for layer, entries in enumerate(round.layers):
            if isinstance(entries, KVEntries):
                for row, (slot, path) in enumerate(zip(round.slots.tolist(), paths, strict=True)):
                    for node in path if slot >= 0 else []:
                        self.rows[layer][slot][0].append(entries.k[row, node].clone())
                        self.rows[layer][slot][1].append(entries.v[row, node].clone())
            elif entries is not None:
                for i in range(max(map(len, paths))):
                    step = path_tensor([p[i : i + 1] for p in paths])
                    count = int32([len(p[i : i + 1]) for p in paths])
                    ops.commit(self.cache.state[recurrent], entries.recurrent, step, count, slots=round.slots)
                    if entries.conv is not None:
                        window = self.cache.conv[recurrent]
                        assert window is not None
                        ops.conv_commit(window, entries.conv, step, count, slots=round.slots)
            recurrent += not isinstance(MIXED[layer], KVSpec)

    def reset(self, slot: int) -> None:
        self.cache.reset([slot])
        for rows in self.rows:
            rows[slot] = ([], [])

    def check(self, cache: DecodingCache, slot: int) -> None:
        recurrent = iter(self.cache.snapshot(slot))
        for spec, rows, memory in zip(MIXED, self.rows, cache.snapshot(slot), strict=True):
            if isinstance(spec, KVSpec):
                want = {
                    name: torch.stack(kept, dim=1) if kept else torch.empty(spec.heads, 0, spec.head_dim)
                    for name, kept in zip(("keys", "values"), rows[slot], strict=True)
                }
            else:
                want = next(recurrent)
            assert memory.keys() == want.keys()
            for name, tensor in want.items():
                assert torch.equal(memory[name], tensor), (slot, spec, name)


@pytest.mark.parametrize("seed", range(6))
def test_any_script_of_rounds_equals_lists(seed: int) -> None:
    """Rounds of random rows, trees, paths and padding, committed or deferred, between resets of slots."""
    r = random.Random(seed)
    cache, shadow = DecodingCache(MIXED, SLOTS), Shadow()
    for step in range(60):
        if r.random() < 0.1:
            slot = r.randrange(SLOTS)
            cache.reset([slot])
            shadow.reset(slot)
        slots = r.sample(range(SLOTS), r.randint(1, SLOTS))
        if r.random() < 0.2:
            slots[r.randrange(len(slots))] = -1
        N = r.randint(1, 9)
        round = random_round(slots, N, 1000 * seed + step)
        paths = [sorted(r.sample(range(N), r.randint(0, N))) for _ in slots]
        if r.random() < 0.5:
            paths = [list(range(len(p))) for p in paths]
        lengths = int32([len(p) for p in paths])
        chain = all(p == list(range(len(p))) for p in paths) and r.random() < 0.5
        path = None if chain else path_tensor(paths)
        if r.random() < 0.5:
            cache.commit(round, path, lengths)
        else:
            cache.defer(round, path, lengths)
            if r.random() < 0.5:  # a pass over the same rows folds the recurrent layers in itself
                pending = cache.take_pending(round.slots.clone())
                assert pending is not None
                for layer in cache.state:
                    factors = pending.recurrent(layer)
                    assert factors is not None
                    ops.commit(cache.state[layer], *factors, slots=round.slots)
                    window, mixed = cache.conv[layer], pending.mixed(layer)
                    if window is not None and mixed is not None:
                        ops.conv_commit(window, mixed, path, lengths, slots=round.slots)
        shadow.commit(round, paths)
        if r.random() < 0.3:
            for slot in range(SLOTS):
                shadow.check(deepcopy(cache), slot)
    for slot in range(SLOTS):
        shadow.check(cache, slot)
        assert int(cache.lengths[slot]) == len(shadow.rows[0][slot][0])


def test_a_slot_grows_and_the_others_keep_their_rows() -> None:
    cache = DecodingCache([WIDE, NARROW], SLOTS)
    first = cache.keys_values(0)[0].shape[2]
    small = random_round([3, 1], 4, 0, specs=(WIDE, NARROW))
    cache.commit(small, None, int32([4, 2]))
    before = [cache.snapshot(slot) for slot in (3, 1)]
    long = random_round([0], 3 * first, 1, specs=(WIDE, NARROW), tree=False)
    with torch.inference_mode():  # forward passes make room inside of it
        cache.defer(long, None, int32([3 * first]))
        assert cache.take_pending(long.slots) is not None
    assert cache.keys_values(0)[0].shape[2] == 4 * first
    assert cache.lengths.tolist() == [3 * first, 2, 0, 4]
    for slot, memory in zip((3, 1), before, strict=True):
        for got, want in zip(cache.snapshot(slot), memory, strict=True):
            assert all(torch.equal(got[name], want[name]) for name in want)
    entries = long.layers[0]
    assert isinstance(entries, KVEntries)
    assert torch.equal(cache.snapshot(0)[0]["keys"], entries.k[0].transpose(0, 1))
    cache.commit(small, None, int32([1, 0]))  # outside of inference mode again
    assert int(cache.lengths[3]) == 5


def test_keys_and_values_are_written_once() -> None:
    """What is behind a slot's length, other slots and rows that were taken already stay as they are."""
    cache = DecodingCache(MIXED, SLOTS)
    for layer in (0, 2, 4, 5):
        for tensor in cache.keys_values(layer):
            tensor.fill_(NAN)
    round = random_round([2], 5, 3)
    cache.defer(round, int32([[0, 3]]), int32([2]))
    assert cache.take_pending(int32([2])) is not None
    keys, _ = cache.keys_values(2)
    assert not keys[2, :, :2].isnan().any()
    assert keys[2, :, 2:].isnan().all()
    assert keys[[0, 1, 3]].isnan().all()
    keys[2, :, :2] = 7.0
    cache.flush()
    assert cache.take_pending(int32([2])) is None
    assert (keys[2, :, :2] == 7.0).all()


def test_keys_of_another_dtype_are_rounded_to_the_caches() -> None:
    round = random_round([0], 3, seed=4, specs=(WIDE,), tree=False)
    exact = DecodingCache((WIDE,), 1)
    rounded = DecodingCache((WIDE,), 1, dtype=torch.bfloat16)
    for cache in (exact, rounded):
        cache.commit(round, None, int32([3]))
    for found, want in zip(rounded.keys_values(0), exact.keys_values(0), strict=True):
        assert torch.equal(found[0, :, :3], want[0, :, :3].bfloat16())


def test_other_rows_settle_what_is_pending() -> None:
    cache, eager = DecodingCache(MIXED, SLOTS), DecodingCache(MIXED, SLOTS)
    round = random_round([2, 0], 5, 3)
    arguments = round, int32([[0, 3], [1, 0]]), int32([2, 1])
    eager.commit(*arguments)
    cache.defer(*arguments)
    assert cache.take_pending(int32([0, 2])) is None
    assert not cache.has_pending
    for slot in range(SLOTS):
        for got, want in zip(cache.snapshot(slot), eager.snapshot(slot), strict=True):
            assert all(torch.equal(got[name], want[name]) for name in want)


def test_skipped_layers_stay_as_they_are() -> None:
    cache = DecodingCache(MIXED, SLOTS)
    cache.commit(random_round([1], 3, 0), None, int32([3]))
    before = cache.snapshot(1)
    round = random_round([1], 2, 1)
    skipped = {0, 1, 5}
    round = round._replace(layers=tuple(None if i in skipped else e for i, e in enumerate(round.layers)))
    keys = [cache.keys_values(i)[0].clone() for i in (0, 5)]
    cache.defer(round, None, int32([2]))
    pending = cache.take_pending(round.slots)
    assert pending is not None
    assert pending.recurrent(1) is None
    assert pending.mixed(1) is None
    assert pending.recurrent(3) is not None
    cache.commit(round, None, int32([2]))
    after = cache.snapshot(1)
    assert torch.equal(after[1]["state"], before[1]["state"])
    assert not torch.equal(after[3]["state"], before[3]["state"])
    for i, kept in zip((0, 5), keys, strict=True):
        assert torch.equal(cache.keys_values(i)[0][1, :, :3], kept[1, :, :3])
    assert int(cache.lengths[1]) == 7
    entries = round.layers[2]
    assert isinstance(entries, KVEntries)
    assert torch.equal(after[2]["keys"][:, 5:], entries.k[0].transpose(0, 1))


@pytest.mark.parametrize(
    ("path", "lengths", "message"),
    [
        ([[0, 2], [1, 1]], [2, 2], "path: row 1 entry 1 is 1 after 1, want ascending nodes below 3"),
        ([[0, 3], [0, 1]], [2, 2], "path: row 0 entry 1 is 3 after 0"),
        ([[-1, 2], [0, 1]], [1, 2], "path: row 0 entry 0 is -1"),
        ([[0, 2]], [2, 2], r"path, path_lengths: got shapes \[1, 2\] and \[2\]"),
        ([[0, 2], [0, 1]], [2], r"path, path_lengths: got shapes \[2, 2\] and \[1\]"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(path, lengths, message) -> None:
    for specs in (MIXED, (WIDE, NARROW)):
        cache = DecodingCache(specs, SLOTS)
        round = random_round([0, 2], 3, 5, specs=specs)
        cache.commit(round, None, int32([3, 1]))
        before = [cache.snapshot(slot) for slot in range(SLOTS)]
        with pytest.raises(ValueError, match=message):
            cache.commit(round, int32(path), int32(lengths))
        for slot in range(SLOTS):
            for got, want in zip(cache.snapshot(slot), before[slot], strict=True):
                assert all(torch.equal(got[name], want[name]) for name in want)


def test_lengths_are_clamped_as_operators_do() -> None:
    cache = DecodingCache(MIXED, SLOTS)
    round = random_round([0, 2], 3, 5)
    cache.commit(round, int32([[0, 2], [0, 1]]), int32([9, -4]))
    assert cache.lengths.tolist() == [2, 0, 0, 0]
    cache.commit(round, None, int32([1, 9]))
    assert cache.lengths.tolist() == [3, 0, 3, 0]


def test_steps_join_what_layers_have() -> None:
    """The first layer may be one that is skipped: the number of nodes does not come from it."""
    first, second = random_round([1, 3], 2, 0, tree=False), random_round([1, 3], 3, 1, tree=False)
    second = second._replace(parents=int32([[1, 1, 3], [0, -1, 2]]))
    without = [r._replace(layers=(None, None, *r.layers[2:])) for r in (first, second)]
    steps = Steps()
    assert len(steps) == 0
    assert steps.kv(2) is None
    assert steps.parents is None
    for round in without:
        steps.extend(round)
    assert len(steps) == 5
    assert steps.kv(0) is None
    assert steps.recurrent(1) is None
    assert steps.mixed(1) is None
    a, b, both = first.layers[2], second.layers[2], steps.kv(2)
    assert isinstance(a, KVEntries)
    assert isinstance(b, KVEntries)
    assert both is not None
    assert torch.equal(both.k, torch.cat([a.k, b.k], dim=1))
    assert torch.equal(both.v, torch.cat([a.v, b.v], dim=1))
    prefix = steps.recurrent(3)
    assert prefix is not None
    assert prefix.factors.u.shape[1] == 5
    assert steps.kv(3) is None
    assert steps.parents is not None
    assert steps.parents.tolist() == [[-1, 0, 1, 1, 3], [-1, 0, 0, -1, 2]]
    with pytest.raises(ValueError, match=r"new: layer 0 got KVEntries, want the NoneType"):
        steps.extend(second)
    with pytest.raises(ValueError, match=r"new: got 1 rows, want the 2"):
        steps.extend(random_round([1], 1, 2))
