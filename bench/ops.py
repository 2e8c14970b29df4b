"""Times the operators against stepping, replaying, Hugging Face's loop and each other.

    python bench/ops.py --json ops.json

The first table is at H = 8 heads, DK = DV = 256 (its last row at the sizes of a small model), a float32 state
and batch 1. States rotate over 24 layers (48 MiB in all), as they do in a model, so that no state waits in a
cache for the next call. Alternatives are timed in turn within one run and the figures are medians (with one
thread, of that thread's own time); a ratio is the other's time over ours. GB/s counts the bytes that the op
cannot avoid: the state once for each read and write, inputs, outputs and factors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from specdec import ops
from specdec.bench.machine import machine
from specdec.bench.operators import HEADS, LAYERS, STRATEGIES, WIDTH, DecodeSteps, Workload, require
from specdec.bench.timing import bytes_of, interleaved
from specdec.ops import Factors, Pending, reference
from specdec.ops.strategy import resolve

DRAFT = 8


def huggingface() -> Callable[..., tuple[Tensor, Tensor]] | None:
    """transformers' token-by-token loop in plain torch, where transformers is installed."""
    try:
        from transformers.models.qwen3_5 import modeling_qwen3_5 as module
    except ImportError:
        return None
    function = module.torch_recurrent_gated_delta_rule
    return getattr(function, "__wrapped__", function)


def headline_rows(seconds: float) -> list[dict[str, Any]]:
    """The four comparisons at batch 1."""
    work = Workload.random(1, DRAFT, LAYERS)
    state_bytes = bytes_of(work.states[0])
    want, want_factors = work.expected(0)
    out, factors = work.verify(0)
    require(out, want, "verify")
    require(factors.u, want_factors.u, "factors")
    committed, want_state = work.states[0].clone(), work.states[0].double()
    ops.commit(committed, factors)
    reference.commit(want_state, want_factors, dtype=torch.float64)
    require(committed, want_state, "commit")
    pending = Pending(factors)
    late = work.states[0].clone()
    late_out, _ = ops.verify(*work.tokens, state=late, pending=pending, qk_l2norm=True, strategy="exact")
    after, _ = ops.verify(*work.tokens, state=committed, qk_l2norm=True, strategy="exact")
    if not (torch.equal(late, committed) and torch.equal(late_out, after)):
        raise SystemExit("deferred commit: not bit-equal to commit and verify, nothing is timed")
    steps = DecodeSteps(work)
    steps.check(want)

    verify_bytes = state_bytes + bytes_of(*work.tokens, out, *factors)
    commit_bytes = 2 * state_bytes + bytes_of(*factors)
    shape = f"B=1 N={DRAFT} H={HEADS} D={WIDTH}"
    # Folding the same factors again and again is harmless: the gates forget, so the states stay of one size.
    written = [state.clone() for state in work.states]

    def separate() -> None:
        layer = work.next_layer()
        ops.commit(written[layer], factors)
        ops.verify(*work.tokens, state=written[layer], qk_l2norm=True, strategy="exact")

    def deferred() -> None:
        layer = work.next_layer()
        ops.verify(*work.tokens, state=written[layer], pending=pending, qk_l2norm=True, strategy="exact")

    functions: dict[str, Callable[[], object]] = {
        "verify": lambda: work.verify(work.next_layer()),
        "steps": steps.run,
        "commit": lambda: ops.commit(written[work.next_layer()], factors),
        "separate": separate,
        "deferred": deferred,
    }
    peer = huggingface()
    if peer is not None:
        transposed = [state.mT.contiguous() for state in work.states]
        q, k, v, g, beta = work.tokens

        def run_peer(layer: int) -> Tensor:
            return peer(
                q, k, v, g=g, beta=beta, initial_state=transposed[layer], output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )[0]  # fmt: skip

        require(run_peer(0), want, "torch_recurrent_gated_delta_rule")
        functions["hf"] = lambda: run_peer(work.next_layer())
    us = interleaved(functions, seconds, layers=LAYERS, libraries=True)

    def row(name: str, ours: str, other: str, moved: int) -> dict[str, Any]:
        return {
            "name": name,
            "shape": shape,
            "us": us[ours],
            "gb_per_s": moved / us[ours] / 1e3,
            "ratio": us[other] / us[ours],
        }

    rows = [row("verify_vs_steps", "verify", "steps", verify_bytes)]
    if peer is not None:
        rows.append(row("verify_vs_hf", "verify", "hf", verify_bytes))
    rows.append(row("commit_vs_replay", "commit", "steps", commit_bytes))
    rows.append(
        row("deferred_vs_separate", "deferred", "separate", verify_bytes + state_bytes + bytes_of(*factors))
    )
    return rows


def layer_row(seconds: float) -> dict[str, Any]:
    """verify_layer against the operators that it stands for, at the sizes of a small model's layer."""
    HK, HV, D, N = 2, 4, 64, DRAFT
    keys, C = HK * D, 2 * HK * D + HV * D
    rng = torch.Generator().manual_seed(0)
    wide = torch.randn(1, N, C + 2 * HV, generator=rng)  # one projection, as in a model
    mixed, a, b = wide[..., :C], wide[..., C : C + HV], wide[..., C + HV :]
    conv_weight = torch.randn(C, 4, generator=rng)
    A_log, dt_bias = torch.randn(2, HV, generator=rng)
    states = [torch.randn(1, HV, D, D, generator=rng) for _ in range(LAYERS)]
    windows = [torch.randn(1, 3, C, generator=rng) for _ in range(LAYERS)]
    turn = 0

    def fused(layer: int) -> tuple[Tensor, Factors]:
        return ops.verify_layer(
            mixed,
            a,
            b,
            conv_weight=conv_weight,
            A_log=A_log,
            dt_bias=dt_bias,
            conv_state=windows[layer],
            state=states[layer],
        )

    def parts(layer: int) -> tuple[Tensor, Factors]:
        y = ops.conv_verify(mixed, conv_weight, conv_state=windows[layer])
        q, k = y[..., :keys].view(1, N, HK, D), y[..., keys : 2 * keys].view(1, N, HK, D)
        v = y[..., 2 * keys :].view(1, N, HV, D)
        g, beta = ops.gated_delta_gates(a, b, A_log, dt_bias)
        return ops.verify(q, k, v, g, beta, state=states[layer], qk_l2norm=True, strategy="exact")

    def in_turn(function: Callable[[int], object]) -> Callable[[], object]:
        def run() -> object:
            nonlocal turn
            turn = (turn + 1) % LAYERS
            return function(turn)

        return run

    out, factors = fused(0)
    want, _ = parts(0)
    if not torch.equal(out, want):
        raise SystemExit("verify_layer: not bit-equal to its parts, nothing is timed")
    us = interleaved({"fused": in_turn(fused), "parts": in_turn(parts)}, seconds, layers=LAYERS)
    moved = bytes_of(states[0], windows[0], wide, conv_weight, out, *factors)
    return {
        "name": "layer_vs_parts",
        "shape": f"B=1 N={N} HK={HK} HV={HV} D={D}",
        "us": us["fused"],
        "gb_per_s": moved / us["fused"] / 1e3,
        "ratio": us["parts"] / us["fused"],
    }


def binary_tree(N: int) -> list[int]:
    """Parents of a complete binary tree in breadth-first order."""
    return [(i - 1) // 2 if i else -1 for i in range(N)]


def strategy_row(B: int, N: int, shape: str, seconds: float) -> dict[str, Any]:
    """Times the strategies and `auto` on one shape. `ratio` is the best one's time over auto's."""
    layers = max(1, LAYERS // B)  # the same 48 MiB at every batch size
    work = Workload.random(B, N, layers, binary_tree(N) if shape == "tree" else None)
    one = work.row()  # one row suffices: that rows do not depend on each other has its own tests
    for strategy in STRATEGIES:
        require(one.verify(0, strategy)[0], one.expected(0)[0], f"{strategy} B={B} N={N} {shape}")

    def timed(strategy: str) -> Callable[[], object]:
        return lambda: work.verify(work.next_layer(), strategy)

    # On a chain hybrid is serial, by another name.
    strategies = STRATEGIES if shape == "tree" else ("serial", "solve")
    us = interleaved({name: timed(name) for name in (*strategies, "auto")}, seconds, layers=layers)
    winner = min(strategies, key=lambda name: us[name])
    out, factors = work.verify(0)
    moved = bytes_of(work.states[0], *work.tokens, out, *factors)
    chosen = resolve("auto", ops.cpu_isa(), B, N, HEADS, WIDTH, WIDTH, tree=work.parents is not None)
    return {
        "name": "strategy",
        "shape": f"B={B} N={N} {shape} H={HEADS} D={WIDTH}",
        "us": us["auto"],
        "gb_per_s": moved / us["auto"] / 1e3,
        "ratio": us[winner] / us["auto"],
        "winner": winner,
        "chosen": chosen,
        "strategies_us": {name: us[name] for name in strategies},
    }


def print_headlines(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(title="Against the alternative, batch 1, states of 24 layers in turn")
    for column in ("row", "shape", "us", "GB/s", "ratio"):
        table.add_column(column, justify="left" if column in ("row", "shape") else "right")
    for row in rows:
        table.add_row(
            row["name"],
            row["shape"],
            f"{row['us']:.1f}",
            f"{row['gb_per_s']:.1f}",
            f"{row['ratio']:.2f}x",
        )
    console.print(table)


def print_strategies(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(title="Strategies (us); auto/best is 1.00 where auto chose the fastest")
    for column in ("shape", *STRATEGIES, "auto", "winner", "chosen", "auto/best"):
        table.add_column(column, justify="left" if column in ("shape", "winner", "chosen") else "right")
    for row in rows:
        us = row["strategies_us"]
        times = [f"{us[name]:.0f}" if name in us else "= serial" for name in STRATEGIES]
        table.add_row(
            row["shape"], *times, f"{row['us']:.0f}", row["winner"], row["chosen"], f"{1 / row['ratio']:.2f}"
        )
    console.print(table)


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write machine and rows here.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few repeats and shapes: does it run?")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; default: torch's.")] = None,
    strategies: Annotated[bool, typer.Option(help="The strategy table too.")] = True,
) -> None:
    """Benchmarks specdec's operators; every row is checked against the float64 reference before it is timed.

    Example: python bench/ops.py --quick --json ops.json
    """
    if threads is not None:
        torch.set_num_threads(threads)
    console = Console()
    about = machine()
    console.print(" · ".join(f"{key} {value}" for key, value in about.items()))
    rows = [*headline_rows(1.0 if quick else 20.0), layer_row(1.0 if quick else 3.0)]
    print_headlines(console, rows)
    if strategies:
        batches, counts = ([1, 4], [1, 8]) if quick else ([1, 4, 16], [1, 2, 4, 8, 16, 32, 64])
        shapes = [
            (B, N, s) for B in batches for N in counts for s in ("chain", "tree") if N > 2 or s == "chain"
        ]
        table = [strategy_row(B, N, s, 0.1 if quick else 2.0) for B, N, s in shapes]
        print_strategies(console, table)
        rows += table
    if json_path is not None:
        json_path.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
