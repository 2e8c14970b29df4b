"""What the GPU benchmarks share: layers in device memory, times by graph replay, checks, rows in JSON.

On a GPU a figure is the median over replays of a CUDA graph that holds one call for every buffer set,
divided by the sets; the sets together exceed the L2 cache three times, so that every call finds its state in
memory, as in a model whose other layers ran in between. Alternatives take turns. On a CPU the same code runs
with a clock: it shows that the benchmark works, its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec import ops
from specdec.ops import Factors, reference

Call = Callable[[], object]


@dataclass(frozen=True)
class Options:
    """The command line of a benchmark."""

    device: str
    quick: bool
    json: Path | None


def options(description: str | None, argv: Sequence[str] | None = None) -> Options:
    """Ends the program where the device is not there."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="small shapes, few repeats: does it run?")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parsed = parser.parse_args(argv)
    if parsed.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: nothing measured (--device cpu --quick tries the code)")
    return Options(parsed.device, parsed.quick, parsed.json)


@dataclass(frozen=True)
class Heads:
    """Key heads, value heads, DK = DV, type of the state."""

    key: int
    value: int
    width: int
    state: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"{self.value}x{self.width}_{'f32' if self.state == torch.float32 else 'bf16'}"


QWEN = Heads(16, 32, 128)
WIDE = Heads(16, 64, 128, torch.bfloat16)
SPECLA = Heads(8, 8, 256)
TINY = Heads(1, 2, 32)


def rotation(bytes_a_set: int, device: str) -> int:
    """Buffer sets to take turns with: three times the L2 cache, at most two fifths of the free memory."""
    if device != "cuda":
        return 2
    l2 = int(torch.cuda.get_device_properties(0).L2_cache_size)
    free, _ = torch.cuda.mem_get_info()
    return max(1, min(2 + 3 * l2 // bytes_a_set, int(0.4 * free) // bytes_a_set, 256))


class Layers:
    """Random tokens and a state for every buffer set; N tokens of B sequences, gated delta rule."""

    def __init__(
        self, heads: Heads, B: int, N: int, device: str, parents: Sequence[int] | None = None
    ) -> None:
        self.heads, self.B, self.N, self.device = heads, B, N, device
        state_bytes = B * heads.value * heads.width**2 * (4 if heads.state == torch.float32 else 2)
        token_bytes = 2 * B * N * heads.width * (2 * heads.key + heads.value)
        self.sets = rotation(state_bytes + token_bytes, device)
        rng = torch.Generator(device=device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng, device=device).bfloat16()

        def uniform(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=rng, device=device)

        key, value, width = heads.key, heads.value, heads.width
        self.tokens = [
            (
                normal(B, N, key, width),
                normal(B, N, key, width),
                normal(B, N, value, width),
                -0.1 * uniform(B, N, value),
                uniform(B, N, value),
            )
            for _ in range(self.sets)
        ]
        self.states = [(2 * uniform(B, value, width, width) - 1).to(heads.state) for _ in range(self.sets)]
        self.parents = None
        if parents is not None:
            self.parents = torch.tensor([list(parents)] * B, dtype=torch.int32, device=device)

    def verify(
        self, index: int, strategy: str, nodes: Any = slice(None), **how: Any
    ) -> tuple[Tensor, Factors]:
        """One call on set `index`; of the tokens `nodes` as a chain, where given."""
        whole = isinstance(nodes, slice) and nodes == slice(None)
        tokens = self.tokens[index] if whole else tuple(t[:, nodes] for t in self.tokens[index])
        return ops.verify(
            *tokens,
            state=self.states[index],
            parents=self.parents if whole else None,
            qk_l2norm=True,
            strategy=strategy,
            **how,
        )

    def expected(self, state: Tensor) -> Tensor:
        """Answers of the last sequence of set 0 in float64, from `state`, as it was before the call."""
        tokens = [t[-1:].cpu() for t in self.tokens[0]]
        parents = None if self.parents is None else self.parents[-1:].cpu()
        return reference.verify(
            *tokens, state=state[-1:].cpu().double(), parents=parents, qk_l2norm=True, dtype=torch.float64
        )[0]


def require(actual: Tensor, expected: Tensor, what: str, tolerance: float = 5e-3) -> None:
    """The last sequence's relative error. Answers are bfloat16: half a unit in the last place of each is 2e-3
    of the norm; other libraries that round operands to bfloat16 say what they are allowed.
    """
    actual = actual[-1:].cpu().double()
    error = float((actual - expected).norm() / expected.norm())
    if not error <= tolerance:
        raise SystemExit(
            f"{what}: relative error {error:.2e}, {tolerance:.0e} is tolerated: nothing is timed"
        )


def measure(alternatives: dict[str, list[Call]], options: Options) -> dict[str, float]:
    """Median microseconds of a call of each alternative, which is a list of one call a buffer set."""
    rounds = 5 if options.quick else 30
    run = {name: _replayer(calls, options.device) for name, calls in alternatives.items()}
    times: dict[str, list[float]] = {name: [] for name in alternatives}
    for turn in range(rounds + 2):
        for name, once in run.items():
            microseconds = once()
            if turn >= 2:
                times[name].append(microseconds / len(alternatives[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def _replayer(calls: list[Call], device: str) -> Callable[[], float]:
    """A function that runs all calls and returns the microseconds."""
    if device != "cuda":

        def by_clock() -> float:
            begin = time.perf_counter()
            for call in calls:
                call()
            return (time.perf_counter() - begin) * 1e6

        return by_clock
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # compiles, tunes and allocates outside of the capture
            calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def by_events() -> float:
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3

    return by_events


def finish(options: Options, rows: list[dict[str, Any]], notes: dict[str, Any] | None = None) -> None:
    """Writes the rows, with what they were measured on."""
    if options.json is None:
        return
    about = {"device": options.device, "torch": torch.__version__, "quick": options.quick, **(notes or {})}
    if options.device == "cuda":
        about["gpu"] = torch.cuda.get_device_name(0)
    options.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


def table(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Prints aligned columns."""
    widths = [max(len(str(line[i])) for line in [header, *lines]) for i in range(len(header))]
    print(f"\n{title}")
    for line in [header, *lines]:
        print("  ".join(str(cell).ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
