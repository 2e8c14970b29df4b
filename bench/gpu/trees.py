"""SpecLA's table (arXiv 2607.16673): verification of trees against replaying every root-to-leaf path, commits
against replaying accepted tokens, and the commit inside the next verification against a launch of its own.

    python bench/gpu/trees.py --json trees.json

Replay of a tree is one verification of a chain for each leaf, whose tokens were gathered before. Replay of
accepted tokens is a decode step a token. `snapshot` copies a state that was kept when the token was verified;
neither the memory nor the write that keeping it took is counted.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from measure import SPECLA, TINY, Heads, Layers, Options, finish, measure, options, require, table

from specdec import ops
from specdec.bench.trees import grow, paths_of
from specdec.ops import Pending

SHAPES = ((2, 4, 8), (2, 8, 16), (2, 12, 16), (4, 4, 16), (4, 4, 32), (4, 8, 64))  # top-k, depth, nodes
STRATEGIES = ("serial", "solve", "hybrid")  # which the paper calls serial, parallel, hybrid
# H100, Gated DeltaNet of 8 heads of 256: ratios to replay of the paper.
PAPER = {
    (2, 12, 16): {"serial": 1.31, "solve": 0.58, "hybrid": 2.20},
    (4, 4, 32): {"serial": 4.74, "solve": 3.47, "hybrid": 7.11},
}


def tree_rows(heads: Heads, shape: tuple[int, int, int], run: Options) -> list[dict[str, Any]]:
    """A row a strategy; `ratio` is the time of the replay over ours."""
    parents = grow(*shape)
    paths = paths_of(parents)
    layers = Layers(heads, 1, len(parents), run.device, parents)
    expected = layers.expected(layers.states[0])
    for strategy in STRATEGIES:
        require(layers.verify(0, strategy)[0], expected, f"{strategy} {shape}")
    gathered = [
        [tuple(t[:, path].contiguous() for t in layers.tokens[i]) for path in paths]
        for i in range(layers.sets)
    ]

    def replay(i: int) -> list[torch.Tensor]:
        state = layers.states[i]
        return [
            ops.verify(*tokens, state=state, qk_l2norm=True, strategy="serial")[0] for tokens in gathered[i]
        ]

    for path, out in zip(paths, replay(0), strict=True):
        require(out, expected[:, path], f"replay {shape}")
    calls: dict[str, list[Any]] = {"replay": [partial(replay, i) for i in range(layers.sets)]}
    for strategy in STRATEGIES:
        calls[strategy] = [partial(layers.verify, i, strategy) for i in range(layers.sets)]
    us = measure(calls, run)
    name = f"top-k {shape[0]} depth {shape[1]} nodes {shape[2]}"
    return [
        {
            "name": strategy,
            "shape": name,
            "leaves": len(paths),
            "us": us[strategy],
            "replay_us": us["replay"],
            "ratio": us["replay"] / us[strategy],
            "paper": PAPER.get(shape, {}).get(strategy),
        }
        for strategy in STRATEGIES
    ]


def commit_rows(heads: Heads, B: int, tokens: int, run: Options) -> list[dict[str, Any]]:
    """Commits of `tokens` factors, and the round of a commit and a verification, fused and separate."""
    layers = Layers(heads, B, tokens, run.device)
    factors = [layers.verify(i, "serial")[1] for i in range(layers.sets)]
    snapshots = [state.clone() for state in layers.states]
    first = Pending(layers.verify(0, "serial", slice(0, 1))[1])

    def replay(i: int) -> None:
        pending = first
        for token in range(tokens):
            pending = Pending(layers.verify(i, "serial", slice(token, token + 1), pending=pending)[1])

    def separate(i: int) -> None:
        ops.commit(layers.states[i], factors[i])
        layers.verify(i, "serial")

    late = layers.states[0].clone()
    fused_out, _ = layers.verify(0, "serial", pending=Pending(factors[0]))
    ops.commit(late, factors[0])
    if not torch.equal(late, layers.states[0]):
        raise SystemExit("the deferred commit is not bit-equal to the commit: nothing is timed")
    require(fused_out, layers.expected(late), "deferred commit")
    sets = range(layers.sets)
    us = measure(
        {
            "exact": [partial(ops.commit, layers.states[i], factors[i]) for i in sets],
            "fast": [partial(ops.commit, layers.states[i], factors[i], mode="fast") for i in sets],
            "replay": [partial(replay, i) for i in sets],
            "snapshot": [partial(layers.states[i].copy_, snapshots[i]) for i in sets],
            "separate": [partial(separate, i) for i in sets],
            "fused": [partial(layers.verify, i, "serial", pending=Pending(factors[i])) for i in sets],
        },
        run,
    )
    shape = f"B {B} tokens {tokens}"
    rows = [("commit exact", "exact", "replay"), ("commit fast", "fast", "replay")]
    rows += [("commit snapshot", "snapshot", "replay"), ("round fused", "fused", "separate")]
    return [
        {"name": name, "shape": shape, "us": us[ours], "against": other, "ratio": us[other] / us[ours]}
        for name, ours, other in rows
    ]


def main(argv: list[str] | None = None) -> None:
    run = options(__doc__, argv)
    heads = TINY if run.quick else SPECLA
    trees = [row for shape in (SHAPES[:2] if run.quick else SHAPES) for row in tree_rows(heads, shape, run)]
    lines = []
    for i in range(0, len(trees), len(STRATEGIES)):
        group = trees[i : i + len(STRATEGIES)]
        cells = [f"{r['ratio']:.2f}x" + (f" ({r['paper']:.2f}x)" if r["paper"] else "") for r in group]
        lines.append([group[0]["shape"], str(group[0]["leaves"]), f"{group[0]['replay_us']:.1f}", *cells])
    header = ["tree", "leaves", "replay us", "serial", "parallel (solve)", "hybrid"]
    table(f"Verification against replay, {heads}, batch 1 (the paper's, H100)", header, lines)
    shapes = ((1, 4),) if run.quick else ((1, 4), (1, 8), (1, 16), (32, 8))
    commits = [row for B, tokens in shapes for row in commit_rows(heads, B, tokens, run)]
    lines = [[r["name"], r["shape"], f"{r['us']:.1f}", f"{r['ratio']:.2f}x", r["against"]] for r in commits]
    table(
        "Commits (the paper: 2.74x to 4.28x, fused 1.15x to 1.44x)", ["", "shape", "us", "ratio", "to"], lines
    )
    finish(run, trees + commits)


if __name__ == "__main__":
    main()
