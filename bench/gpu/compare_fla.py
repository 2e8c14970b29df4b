"""Rounds of a chain, beside what flash-linear-attention's kernels can be made to do.

A round is a verification of T tokens and the commit of the A that were accepted.

    python bench/gpu/compare_fla.py --json fla.json

| name | verification | commit of A tokens |
|---|---|---|
| fla steps, snapshots | T launches of the recurrent kernel, each writes a state | none: a state is chosen |
| fla fused, replay | one launch of it for T tokens, no state | one launch for A tokens, writes the state |
| fla chunk, replay | the chunk kernel for T tokens, no state | the chunk kernel for A tokens |
| specdec ... | one launch, factors, state written by the fold of the round before | in the same launch |

Without flash-linear-attention, or on a CPU, specdec's rows alone are measured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measure import QWEN, TINY, Heads, Layers, Options, finish, measure, options, require, table
from torch import Tensor

from specdec.ops import Pending

# Its products round operands to bfloat16.
TOLERANCE = 2e-2


def flash_linear_attention() -> Any:
    """The module with its gated delta rule, or None."""
    try:
        from fla.ops import gated_delta_rule
    except ImportError:
        return None
    return gated_delta_rule


class Peer:
    """Its kernels on the same tokens; states are [B, HV, DK, DV]."""

    def __init__(self, module: Any, layers: Layers, accepted: int) -> None:
        self.recurrent = module.fused_recurrent_gated_delta_rule
        self.chunk = module.chunk_gated_delta_rule
        self.layers, self.accepted = layers, accepted
        self.states = [state.float().mT.contiguous() for state in layers.states]

    def run(self, kernel: Callable[..., Any], i: int, tokens: slice, state: Tensor, final: bool) -> Any:
        q, k, v, g, beta = (t[:, tokens] for t in self.layers.tokens[i])
        return kernel(
            q,
            k,
            v,
            g=g,
            beta=beta,
            initial_state=state,
            output_final_state=final,
            use_qk_l2norm_in_kernel=True,
        )

    def snapshots(self, i: int) -> tuple[list[Tensor], list[Tensor]]:
        """Answers of the tokens, and the states after them, all of which stay until the round is decided."""
        state, outs, kept = self.states[i], [], []
        for token in range(self.layers.N):
            out, state = self.run(self.recurrent, i, slice(token, token + 1), state, True)
            outs.append(out)
            kept.append(state)
        return outs, kept

    def replay(self, kernel: Callable[..., Any], i: int) -> tuple[list[Tensor], Tensor]:
        """Answers, and the state after the accepted tokens, which takes the place of the old one."""
        out = self.run(kernel, i, slice(None), self.states[i], False)[0]
        return [out], self.run(kernel, i, slice(0, self.accepted), self.states[i], True)[1]

    def calls(self) -> dict[str, Callable[[int], tuple[list[Tensor], Any]]]:
        return {
            "fla steps, snapshots": self.snapshots,
            "fla fused, replay": partial(self.replay, self.recurrent),
            "fla chunk, replay": partial(self.replay, self.chunk),
        }


def rows_of(heads: Heads, B: int, T: int, module: Any, run: Options) -> list[dict[str, Any]]:
    """One row a way; `ratio` is its time over that of specdec's fastest."""
    layers = Layers(heads, B, T, run.device)
    accepted = max(1, T // 2)
    lengths = torch.full((B,), accepted, dtype=torch.int32, device=run.device)
    factors = [layers.verify(i, "serial")[1] for i in range(layers.sets)]
    sets = range(layers.sets)
    expected = layers.expected(layers.states[0])
    calls: dict[str, list[Any]] = {}
    if module is not None:
        peer = Peer(module, layers, accepted)
        for name, call in peer.calls().items():
            require(torch.cat(call(0)[0], dim=1), expected, f"{name} B={B} T={T}", TOLERANCE)
            calls[name] = [partial(call, i) for i in sets]
    for strategy in ("serial", "solve"):  # of a chain hybrid is the serial launch
        require(layers.verify(0, strategy)[0], expected, f"{strategy} B={B} T={T}")
        calls[f"specdec {strategy}"] = [
            partial(layers.verify, i, strategy, pending=Pending(factors[i], None, lengths)) for i in sets
        ]
    us = measure(calls, run)
    best = min(time for name, time in us.items() if name.startswith("specdec"))
    return [
        {
            "name": name,
            "heads": str(heads),
            "B": B,
            "T": T,
            "accepted": accepted,
            "us": time,
            "ratio": time / best,
        }
        for name, time in us.items()
    ]


def main(argv: list[str] | None = None) -> None:
    run = options(__doc__, argv)
    module = flash_linear_attention() if run.device == "cuda" else None
    if module is None:
        print("flash-linear-attention is not compared: it needs a GPU, fla and triton")
    shapes = [(TINY, 2, 4)] if run.quick else [(QWEN, B, T) for B in (1, 32, 128) for T in (4, 8, 16)]
    rows: list[dict[str, Any]] = []
    for heads, B, T in shapes:
        rows += rows_of(heads, B, T, module, run)
        if run.device == "cuda":
            torch.cuda.empty_cache()
    lines = [
        [r["heads"], str(r["B"]), str(r["T"]), r["name"], f"{r['us']:.1f}", f"{r['ratio']:.2f}x"]
        for r in rows
    ]
    table("A round: verification and commit", ["heads", "B", "T", "way", "us", "over specdec's best"], lines)
    finish(run, rows, {"fla": None if module is None else _version("flash-linear-attention", "fla-core")})


def _version(*packages: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    for package in packages:
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
    return "unknown"


if __name__ == "__main__":
    main()
