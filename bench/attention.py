"""Times `tree_attention` against torch's `scaled_dot_product_attention` with a mask.

    python bench/attention.py --json attention.json

Batch 1, the heads of SmolLM2-135M (9 query and 3 key heads, D = 64) unless told otherwise, N nodes of a
binary tree below a cache. Caches rotate over 30 layers, as they do in a model. torch gets keys and values in
one tensor, the new ones copied behind the committed ones, as it wants them; its columns are its two ways with
grouped heads: `enable_gqa`, and the heads of a group folded into the queries. Alternatives are timed in turn
within one run and the figures are medians (with one thread, of that thread's own time); the ratio is the
faster of torch's over ours. GB/s counts the keys and values of the cache once.

torch does not promise what `tree_attention` does, a node's bits of decoding: where it is faster, that is the
price of the promise.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specdec import ops
from specdec.bench.machine import machine
from specdec.bench.operators import require
from specdec.bench.timing import bytes_of, interleaved
from specdec.ops import attention_reference

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Workload:
    """A tree of N nodes, and as many caches as a model has layers."""

    def __init__(self, N: int, committed: int, HQ: int, HK: int, D: int, layers: int, dtype: torch.dtype):
        rng = torch.Generator().manual_seed(0)
        self.q = torch.randn(1, N, HQ, D, generator=rng).to(dtype)
        self.k, self.v = torch.randn(2, 1, N, HK, D, generator=rng).to(dtype)
        room = committed + N
        self.caches = [torch.randn(2, 1, HK, room, D, generator=rng).to(dtype) for _ in range(layers)]
        self.committed, self.room, self.groups = committed, room, HQ // HK
        self.lengths = torch.tensor([committed], dtype=torch.int32)
        tree = [(i - 1) // 2 if i else -1 for i in range(N)]
        self.parents = torch.tensor([tree], dtype=torch.int32)
        self.mask = torch.ones(N, room, dtype=torch.bool)  # [N, T]
        self.mask[:, committed:] = False
        for i, parent in enumerate(tree):
            if parent >= 0:
                self.mask[i, committed:] = self.mask[parent, committed:]
            self.mask[i, committed + i] = True
        self.turn = 0

    def next_cache(self) -> Tensor:
        self.turn = (self.turn + 1) % len(self.caches)
        return self.caches[self.turn]

    def ours(self) -> Tensor:
        k_cache, v_cache = self.next_cache()
        return ops.tree_attention(
            self.q,
            self.k,
            self.v,
            k_cache=k_cache,
            v_cache=v_cache,
            cache_lengths=self.lengths,
            parents=self.parents,
        )

    def whole(self) -> Tensor:
        """Keys and values of the next layer [2, 1, HK, T, D], the new ones behind the others."""
        cache = self.next_cache()
        cache[0, :, :, self.committed :] = self.k.transpose(1, 2)
        cache[1, :, :, self.committed :] = self.v.transpose(1, 2)
        return cache

    def torch_gqa(self) -> Tensor:
        k, v = self.whole()
        out = scaled_dot_product_attention(
            self.q.transpose(1, 2), k, v, self.mask, enable_gqa=self.groups > 1
        )
        return out.transpose(1, 2)

    def torch_folded(self) -> Tensor:
        k, v = self.whole()
        _, N, HQ, D = self.q.shape
        folded = (
            self.q.view(1, N, -1, self.groups, D).permute(0, 2, 3, 1, 4).reshape(1, -1, self.groups * N, D)
        )
        mask = self.mask.repeat(self.groups, 1)  # [G N, T]
        out = scaled_dot_product_attention(folded, k, v, mask).view(1, -1, self.groups, N, D)
        return out.permute(0, 3, 1, 2, 4).reshape(1, N, HQ, D)

    def check(self) -> None:
        """All of them against float64; bfloat16 answers differ by their own rounding."""
        k_cache, v_cache = self.caches[1]
        want = attention_reference.tree_attention(
            self.q,
            self.k,
            self.v,
            k_cache=k_cache,
            v_cache=v_cache,
            cache_lengths=self.lengths,
            parents=self.parents,
            dtype=torch.float64,
        )
        for function in (self.ours, self.torch_gqa, self.torch_folded):
            self.turn = 0
            if self.q.dtype == torch.float32:
                require(function(), want, function.__name__)


def row(N: int, committed: int, HQ: int, HK: int, D: int, dtype: str, layers: int, seconds: float) -> Any:
    """Times one shape."""
    work = Workload(N, committed, HQ, HK, D, layers, DTYPES[dtype])
    work.check()
    ways = {"ours": work.ours, "torch_gqa": work.torch_gqa, "torch_folded": work.torch_folded}
    us = interleaved(ways, seconds, layers=layers, libraries=True)
    moved = bytes_of(work.caches[0][:, :, :, :committed])
    return {
        "name": "tree_attention",
        "shape": f"heads={HQ}/{HK} D={D} {dtype}",
        "nodes": N,
        "cache": committed,
        "us": us["ours"],
        "torch_us": {"enable_gqa": us["torch_gqa"], "folded": us["torch_folded"]},
        "gb_per_s": moved / us["ours"] / 1e3,
        "ratio": min(us["torch_gqa"], us["torch_folded"]) / us["ours"],
    }


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write machine and rows here.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few repeats and shapes: does it run?")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; default: torch's.")] = None,
    heads: Annotated[str, typer.Option(help="Query heads / key heads / D.")] = "9/3/64",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
) -> None:
    """Benchmarks tree_attention; float32 rows are checked against float64 before they are timed.

    Example: python bench/attention.py --quick
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if dtype not in DTYPES:
        raise typer.BadParameter(f"got {dtype}, want float32 or bfloat16", param_hint="--dtype")
    sizes = heads.split("/")
    if len(sizes) != 3 or not all(size.isdecimal() for size in sizes):
        raise typer.BadParameter(f"got {heads}, want three numbers as in 9/3/64", param_hint="--heads")
    HQ, HK, D = map(int, sizes)
    console = Console()
    about = machine()
    console.print(" · ".join(f"{key} {value}" for key, value in about.items()))
    counts, caches = ([1, 5], [64]) if quick else ([1, 5, 16, 64], [64, 512, 1024, 4096])
    layers, seconds = (3, 0.1) if quick else (30, 4.0)
    with torch.inference_mode():
        rows = [row(N, committed, HQ, HK, D, dtype, layers, seconds) for committed in caches for N in counts]
    table = Table(title=f"tree_attention against torch's attention, batch 1, {rows[0]['shape']}")
    for column in ("nodes", "cache", "us", "GB/s", "torch gqa us", "torch folded us", "ratio"):
        table.add_column(column, justify="right")
    for found in rows:
        torch_us = found["torch_us"]
        table.add_row(
            str(found["nodes"]),
            str(found["cache"]),
            f"{found['us']:.0f}",
            f"{found['gb_per_s']:.1f}",
            f"{torch_us['enable_gqa']:.0f}",
            f"{torch_us['folded']:.0f}",
            f"{found['ratio']:.2f}x",
        )
    console.print(table)
    if json_path is not None:
        json_path.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
