"""The static report on the CUDA kernels: what the compiler made of them, and what the executor counted.

`make kernel-report [JSON=OUT]` builds the kernels of csrc/cuda for each architecture, runs standard shapes
through the SIMT executor and prints a row per kernel instance and architecture. No GPU is needed: the times
of the last table are predictions from counted bytes and operations and the vendors' peaks, not measurements.

Objects that have not changed since the last report are neither compiled nor read again.

It fails where an instance uses local memory (a spill), where solve or prefill have no tensor-core
instruction, where a kernel on the state has no load of 16 bytes, and where no shape runs an instance.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from compiled_kernels import Kernel, ToolError, faults, find_tool, read_object, run
from gpus import ARCHITECTURES, GPUS

ROOT = Path(__file__).resolve().parent.parent
# Multiply-adds of one matrix operation of a warp, twice: m16n8k8 and m16n8k16.
MMA_FLOPS = {"mma_tf32": 2 * 16 * 8 * 8, "mma_bf16": 2 * 16 * 8 * 16}


@dataclass
class Row(Kernel):
    """One kernel instance on one architecture, dynamic shared memory included. None: no shape runs it."""

    occupancy: float | None = None
    bytes_over_least: float | None = None  # of all launches of the op
    sectors_per_request: float | None = None
    bank_conflicts: int | None = None  # passes of the worst request to shared memory beyond its first


@dataclass
class Shape:
    """What one op moved on one standard shape."""

    op: str
    shape: str
    listed: bool  # among the tables; else there to run an instance
    least_bytes: int
    flops: float
    kernels: list[dict[str, Any]] = field(default_factory=list)

    @property
    def moved(self) -> int:
        """Bytes of all launches."""
        return sum(k["bytes_read"] + k["bytes_written"] for k in self.kernels)

    @property
    def over_least(self) -> float:
        """Bytes moved over the least possible."""
        return self.moved / self.least_bytes

    def matrix_flops(self, unit: str) -> float:
        """Operations on tensor cores."""
        return float(sum(k[unit] for k in self.kernels) * MMA_FLOPS[unit])


def build(directory: Path, archs: str | None, jobs: int) -> tuple[list[Path], Path]:
    """Compiles the kernels: objects for GPUs, and the program that runs the standard shapes."""
    options = ["-DSPECDEC_TORCH=OFF", f"-DPython_EXECUTABLE={sys.executable}"]
    if archs:
        options.append("-DCMAKE_CUDA_ARCHITECTURES=" + ";".join(f"{arch}-real" for arch in archs.split(",")))
    run("cmake", "-S", ROOT, "-B", directory, *options)
    targets = ["specdec_kernels_cuda", "specdec_kernel_shapes"]
    run("cmake", "--build", directory, "--parallel", str(jobs), "--target", *targets)
    objects = (directory / "csrc/cuda/CMakeFiles/specdec_kernels_cuda.dir").glob("*.cu.o")
    sources = {path.name for path in (ROOT / "csrc/cuda").glob("*.cu")}
    current = sorted(path for path in objects if path.name.removesuffix(".o") in sources)
    return current, directory / "csrc/cuda/specdec_kernel_shapes"


def compiled(objects: list[Path], memory: Path, jobs: int) -> list[Kernel]:
    """The kernels of the objects; `memory` is a file that remembers those of objects read before."""
    known = json.loads(memory.read_text()) if memory.exists() else {}
    parser = hashlib.sha256((ROOT / "tools/compiled_kernels.py").read_bytes()).hexdigest()
    marks = {path.name: [path.stat().st_mtime_ns, path.stat().st_size, parser] for path in objects}
    fresh = [path for path in objects if known.get(path.name, {}).get("mark") != marks[path.name]]
    with ThreadPoolExecutor(jobs) as pool:
        for path, kernels in zip(fresh, pool.map(read_object, fresh), strict=True):
            known[path.name] = {"mark": marks[path.name], "kernels": [asdict(kernel) for kernel in kernels]}
    known = {name: known[name] for name in marks}
    memory.write_text(json.dumps(known))
    return [Kernel(**kernel) for entry in known.values() for kernel in entry["kernels"]]


def enumerators() -> dict[str, str]:
    """Enumerators: the demangler's words ("(Gate)1") to the executor's ("Gate::kHead")."""
    text = (ROOT / "csrc/include/specdec/types.h").read_text()
    names = {}
    for enum, body in re.findall(r"enum class (\w+) : int32_t \{([^}]*)\}", text):
        without_comments = re.sub(r"//[^\n]*", "", body)
        for value, part in enumerate(filter(None, (p.strip() for p in without_comments.split(",")))):
            names[f"({enum}){value}"] = f"{enum}::{part.split('=')[0].strip()}"
    return names


def canonical(name: str, enums: dict[str, str]) -> str:
    """A kernel's name in the same words whichever compiler wrote it."""
    inner = re.search(r"detail::run<(.*)>\(", name)
    name = inner.group(1).strip() if inner else name
    name = re.sub(r"\bspecdec::|\bcuda::|\bsimt::|\(int\)", "", name)
    name = name.replace("__nv_bfloat16", "bfloat16").replace("__half", "half")
    for number, word in enums.items():
        name = name.replace(number, word)
    name = re.sub(r"\b\w+::\(anonymous namespace\)::", "", name)
    return re.sub(r"\s*>", ">", name)


def plain_names(kernels: list[Kernel]) -> list[Row]:
    """Rows with names in plain words, in their order and that of the architectures."""
    if not kernels:
        return []
    names = list(dict.fromkeys(kernel.kernel for kernel in kernels))
    enums = enumerators()
    words = {
        name: canonical(line, enums)
        for name, line in zip(names, run("c++filt", *names).splitlines(), strict=True)
    }
    rows = [Row(**{**asdict(kernel), "kernel": words[kernel.kernel]}) for kernel in kernels]
    return sorted(rows, key=lambda row: (row.kernel, int(row.arch.removeprefix("sm_"))))


def executed(program: Path) -> list[Shape]:
    """The standard shapes, run through the executor."""
    shapes = [Shape(**shape) for shape in json.loads(run(program))]
    for shape in shapes:
        for kernel in shape.kernels:
            kernel["kernel"] = canonical(kernel["kernel"], {})
    return shapes


def join(rows: list[Row], shapes: list[Shape]) -> None:
    """Adds what was counted, the worst of the shapes that ran an instance, and the occupancy."""
    for row in rows:
        dynamic = None
        for shape in shapes:
            for kernel in shape.kernels:
                if kernel["kernel"] != row.kernel:
                    continue
                dynamic = max(dynamic or 0, kernel["shared_bytes"])
                if shape.listed:
                    row.bytes_over_least = max(row.bytes_over_least or 0.0, round(shape.over_least, 3))
                row.sectors_per_request = max(row.sectors_per_request or 0.0, kernel["sectors_per_request"])
                row.bank_conflicts = max(row.bank_conflicts or 0, kernel["bank_conflicts"])
        if dynamic is None:
            continue
        row.shared_bytes += dynamic
        arch = ARCHITECTURES[row.arch]
        row.occupancy = round(arch.occupancy(row.threads, row.registers, row.shared_bytes), 3)


def not_run(rows: list[Row]) -> list[str]:
    """Faults: instances that no shape has run."""
    names = dict.fromkeys(row.kernel for row in rows if row.sectors_per_request is None)
    return [f"{name} is run by no shape of tools/kernel_shapes.cpp" for name in names]


def table(heading: str, lines: list[list[str]]) -> None:
    """Prints columns, the first to the left."""
    first, *rest = (list(column) for column in zip(heading.split("|"), *lines, strict=True))
    columns = [pad(first, str.ljust), *(pad(column, str.rjust) for column in rest)]
    for cells in zip(*columns, strict=True):
        print("  ".join(cells))
    print()


def pad(cells: list[str], adjust: Callable[[str, int], str]) -> list[str]:
    """Cells of one width."""
    width = max(map(len, cells))
    return [adjust(cell, width) for cell in cells]


def counted(value: float | None) -> str:
    """A number that only executed instances have."""
    return "-" if value is None else f"{value:g}"


def show(rows: list[Row], shapes: list[Shape]) -> None:
    """Prints the three tables."""
    print(
        "Kernels as compiled, and traffic as the executor counted it on shapes (-: not a standard one);\n"
        "extra passes are those of the worst request to shared memory, by bank conflicts"
    )
    lines = []
    for r in rows:
        numbers = (r.registers, r.shared_bytes, r.spill_bytes)
        facts = (r.hmma, r.wide_loads, r.local_accesses)
        traffic = (r.bytes_over_least, r.sectors_per_request, r.bank_conflicts)
        occupancy = "-" if r.occupancy is None else f"{r.occupancy:.0%}"
        cells = [*map(str, numbers), occupancy, *map(str, facts), *map(counted, traffic)]
        lines.append([r.kernel, r.arch, *cells])
    resources, sass = "regs|shared|spill|occupancy", "HMMA|128-bit loads|local"
    table(f"kernel|arch|{resources}|{sass}|bytes/least|sectors/req|extra passes", lines)

    print("Standard shapes: bytes counted over all launches of an op, and the least possible")
    shapes = [shape for shape in shapes if shape.listed]
    lines = []
    for s in shapes:
        cells = [f"{s.moved}", f"{s.least_bytes}", f"{s.over_least:.3f}", f"{len(s.kernels)}"]
        lines.append([s.op, s.shape, *cells])
    table("op|shape|counted|least|ratio|launches", lines)

    print("PREDICTION, not a measurement: roofline time in microseconds from counted bytes and operations at")
    print("the vendors' peak rates, without launch, latency or occupancy")
    for gpu in GPUS:
        print(f"  {gpu.name}: {gpu.bytes_per_second / 1e9:g} GB/s, {gpu.source}")
    lines = []
    for s in shapes:
        matrix = s.matrix_flops("mma_tf32"), s.matrix_flops("mma_bf16")
        times = [gpu.microseconds(s.moved, s.flops, *matrix) for gpu in GPUS]
        lines.append([s.op, s.shape, *(f"{time:.4f}" for time in times)])
    table("op|shape|" + "|".join(gpu.name for gpu in GPUS), lines)


def summary(rows: list[Row]) -> None:
    """Prints a line per kernel and architecture: how many instances, their registers and occupancy."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.kernel.split("<")[0], row.arch), []).append(row)
    lines = []
    for (kernel, arch), group in groups.items():
        registers = [row.registers for row in group]
        occupancies = [row.occupancy for row in group if row.occupancy is not None]
        spread = f"{min(occupancies):.0%} to {max(occupancies):.0%}" if occupancies else "-"
        spills = str(sum(row.spill_bytes > 0 for row in group))
        lines.append([kernel, arch, str(len(group)), f"{min(registers)} to {max(registers)}", spread, spills])
    print("Summary")
    table("kernel|arch|instances|registers|occupancy|with spills", lines)


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="also write the rows there")
    # The directory of the C++ tests: they have compiled the executor's kernels.
    parser.add_argument("--build", type=Path, default=ROOT / "build/tests", help="directory of the build")
    parser.add_argument("--archs", help="numbers of architectures with commas (80,90,100,120)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    try:
        for tool in ("nvcc", "cuobjdump", "nvdisasm"):
            find_tool(tool)
        print("Building: minutes the first time, little where nothing has changed", flush=True)
        objects, program = build(options.build, options.archs, options.jobs)
        rows = plain_names(compiled(objects, options.build / "compiled_kernels.json", options.jobs))
        shapes = executed(program)
    except ToolError as error:
        sys.exit(f"kernel-report: {error}")
    join(rows, shapes)
    show(rows, shapes)
    summary(rows)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    found = [fault for row in rows for fault in faults(row, row.kernel)]
    found += not_run(rows)
    if not rows:
        found.append("no kernel was compiled")
    for fault in found:
        print(f"fault: {fault}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
