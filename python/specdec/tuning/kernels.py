"""Measures the verification strategies on this machine and writes the table that `auto` and `exact` read."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from specdec._checks import check_number
from specdec.ops import cpu_isa, verify
from specdec.ops import strategy as table

HEADS = 8
BATCHES = (1, 4, 16)
# Denser where a solve of one node more takes another vector of columns (9, 18).
NODES = (2, 3, 4, 5, 6, 8, 9, 12, 16, 18, 24, 32, 48, 64)
WIDTHS = (64, 128, 256)  # DK = DV
MODEL_LAYERS = 24
_WORKING_SET = 64 << 20  # bytes of states that take turns, unless all layers together have fewer
_LEAST_REPEATS = 3

Progress = Callable[[int, int, table.Point], None]


def measure_strategies(
    progress: Progress | None = None,
    budget: float = 120.0,
    path: Path | None = None,
    batches: tuple[int, ...] = BATCHES,
    nodes: tuple[int, ...] = NODES,
    widths: tuple[int, ...] = WIDTHS,
) -> Path:
    """Times serial, hybrid and solve on chains and trees and writes the winners' table.

    The strategies of a shape are interleaved, so that whatever else the machine does hits all of them, and
    each is represented by the first quartile of its repetitions: other processes add time, and now and then a
    clock of thread time loses some. With one thread the time is that thread's, which waiting for a busy core
    does not touch.

    Args:
        progress: called with (points done, points in all, the point just measured).
        budget: seconds for all points together; every strategy is repeated at least three times whatever that
            takes.
        path: file to write; None for `specdec.ops.strategy.user_table_path()`. Tables of other instruction
            sets in it are kept.
        batches, nodes, widths: the grid of B, N and DK = DV, at 8 heads.

    Returns:
        The path written.

    Raises:
        ValueError: `budget` is no finite number, or negative.
        specdec.ops.strategy.TableError: `path` was given, exists and is not a table.
        OSError: no file can be written beside `path`; found out before anything is measured.
    """
    check_number("budget", budget, 0.0)
    if path is None:
        path, tables = table.user_table_path(), dict(table.user_tables())  # a damaged one is replaced
    else:
        tables = table.read_tables(path) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent):
        pass
    shapes = [(B, N, D, tree) for D in widths for B in batches for N in nodes for tree in (False, True)]
    points: list[table.Point] = []
    for done, (B, N, D, tree) in enumerate(shapes, start=1):
        points.append(measure_point(B, N, D, tree, budget / len(shapes)))
        if progress is not None:
            progress(done, len(shapes), points[-1])
    tables[cpu_isa()] = table.Table(torch.get_num_threads(), points)
    table.write_tables(path, tables)
    table.reload()
    return path


def measure_point(B: int, N: int, D: int, tree: bool, budget: float) -> table.Point:
    """One point, for `budget` seconds: Gated DeltaNet in float32 with HK = HV = 8 and DK = DV = D."""
    strategies = table.STRATEGIES if tree else ("serial", "solve")
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    run = _verification(B, N, D, tree)

    def seconds(strategy: str) -> float:
        start = clock()
        run(strategy)
        return clock() - start

    for strategy in strategies:
        run(strategy)  # the warm-up
    times: dict[str, list[float]] = {strategy: [] for strategy in strategies}
    end = time.perf_counter() + budget
    repeats = 0
    while repeats < _LEAST_REPEATS or time.perf_counter() < end:
        for strategy in strategies:
            times[strategy].append(seconds(strategy))
        repeats += 1
    us = {strategy: round(1e6 * sorted(all_)[len(all_) // 4], 1) for strategy, all_ in times.items()}
    return table.Point(B * HEADS, N, D * D, tree, us)


def _verification(B: int, N: int, D: int, tree: bool) -> Callable[[str], object]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v = normal(3, B, N, HEADS, D)
    g = -torch.rand(B, N, HEADS, generator=generator)
    beta = torch.rand(B, N, HEADS, generator=generator)
    state = normal(B, HEADS, D, D)
    # A layer's state has left the caches when its turn comes again: other layers ran in between.
    layers = min(MODEL_LAYERS, max(2, _WORKING_SET // (4 * state.numel())))
    states = itertools.cycle([state] + [state.clone() for _ in range(layers - 1)])
    parents = torch.tensor([list(_tree_parents(N))] * B, dtype=torch.int32) if tree else None
    return lambda strategy: verify(
        q, k, v, g, beta, state=next(states), parents=parents, qk_l2norm=True, strategy=strategy
    )


def _tree_parents(N: int) -> Iterator[int]:
    """A draft tree: a trunk of half the nodes, the others in branches of two along it."""
    trunk = (N + 1) // 2
    for node in range(N):
        if node < trunk:
            yield node - 1
        elif (node - trunk) % 2 == 0:
            yield (node - trunk) // 2 % trunk
        else:
            yield node - 1
