"""The static report on the CUDA kernels: what the compiler made of them, and what the executor counted.

`make kernel-report [JSON=OUT]` compiles every kernel of csrc/cuda for each architecture, runs standard shapes
through the SIMT executor and prints a row per kernel instance and architecture. No GPU is needed: the times
of the last table are predictions from counted bytes and operations and the vendors' peaks, not measurements.

It fails where an instance uses local memory (a spill), or where a kernel of the masked solve has no
tensor-core instruction.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpus import ARCHITECTURES, GPUS

ROOT = Path(__file__).resolve().parent.parent
# Multiply-adds of one matrix operation of a warp, twice: m16n8k8 and m16n8k16.
MMA_FLOPS = {"mma_tf32": 2 * 16 * 8 * 8, "mma_bf16": 2 * 16 * 8 * 16}


@dataclass
class Row:
    """One kernel instance on one architecture; None: no standard shape runs this instance."""

    kernel: str
    arch: str
    registers: int = 0
    shared_bytes: int = 0  # of a block: static, and dynamic as the standard shapes ask for it
    spill_bytes: int = 0  # local memory of a thread, spills and arrays
    threads: int = 0
    occupancy: float = 0.0
    hmma: int = 0  # instructions of the tensor cores
    wide_loads: int = 0  # global accesses of 16 bytes
    local_accesses: int = 0
    bytes_over_least: float | None = None  # of all launches of the op
    sectors_per_request: float | None = None
    bank_conflicts: int | None = None  # passes of the worst request to shared memory: 1 is none


@dataclass
class Shape:
    """What one op moved on one standard shape."""

    op: str
    shape: str
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


def run(*command: str | Path) -> str:
    """Standard output of a command; its last lines of errors and exit where it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        sys.exit(f"{tail}\nkernel-report: {command[0]} failed")
    return done.stdout


def find_tool(name: str) -> str:
    """Path of cuobjdump or nvdisasm: from PATH, beside nvcc, or of their pip packages."""
    places = [Path(p) for p in sys.path] + [Path("/usr/local/cuda/bin")]
    found = shutil.which(name)
    candidates = [Path(found)] if found else []
    for place in places:
        candidates += [place / name, *sorted(place.glob(f"nvidia/cu*/bin/{name}"))]
        candidates += sorted(place.glob(f"nvidia/cuda_{name}/bin/{name}"))
    for candidate in candidates:
        if candidate.is_file():
            return str(candidate)
    sys.exit(f"kernel-report: {name} was not found; pip install nvidia-cuda-{name}")


def architectures(nvcc: str) -> list[str]:
    """The architectures of the report that this compiler knows."""
    known = run(nvcc, "--list-gpu-arch").split()
    return [arch for arch in ARCHITECTURES if arch.replace("sm_", "compute_") in known]


def build(directory: Path, archs: list[str], jobs: int) -> tuple[Path, Path]:
    """Compiles the kernels for GPUs, and the program of the standard shapes with those for the executor."""
    real = ";".join(f"{arch[3:]}-real" for arch in archs)
    options = [f"-DCMAKE_CUDA_ARCHITECTURES={real}", f"-DPython_EXECUTABLE={sys.executable}"]
    run("cmake", "-S", ROOT, "-B", directory, "-DSPECDEC_TORCH=OFF", *options)
    targets = ["specdec_kernels_cuda", "specdec_kernel_shapes"]
    run("cmake", "--build", directory, "--parallel", str(jobs), "--target", *targets)
    return next(directory.rglob("libspecdec_kernels_cuda.a")), next(directory.rglob("specdec_kernel_shapes"))


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


def functions(text: str, heading: str) -> Iterator[tuple[str, str, str]]:
    """(architecture, mangled name, text of the function) of a dump of cuobjdump."""
    for part in re.split(r"(?m)^\s*arch = ", text)[1:]:
        arch, body = part.split("\n", 1)
        pieces = re.split(heading, body)
        for name, content in zip(pieces[1::2], pieces[2::2], strict=True):
            yield arch.strip(), name, content


def compiled(library: Path, archs: list[str]) -> list[Row]:
    """A row per kernel and architecture, as the compiler left them."""
    cuobjdump = find_tool("cuobjdump")
    os.environ["PATH"] = os.pathsep.join([str(Path(find_tool("nvdisasm")).parent), os.environ["PATH"]])
    rows: dict[tuple[str, str], Row] = {}
    usage = run(cuobjdump, "-res-usage", library)
    for arch, name, text in functions(usage, r"(?m)^\s*Function (\S+):$"):
        used = {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text)}
        # The runtime keeps some KiB of shared memory from sm_90 on; it is in SHARED and not the kernel's.
        shared = max(0, used["SHARED"] - (1024 if arch not in ("sm_80",) else 0))
        rows[arch, name] = Row(name, arch, used["REG"], shared, used["STACK"] + used["LOCAL"])
    for arch in archs:
        elf = run(cuobjdump, "-elf", "-arch", arch, library)
        for name, text in re.findall(r"(?ms)^\.nv\.info\.(\S+)\n(.*?)(?=^\.\S)", elf):
            threads = re.search(r"EIATTR_MAX_THREADS\s+Format:\s+\S+\s+Value:\s+(\S+)", text)
            if threads and (arch, name) in rows:
                rows[arch, name].threads = int(threads.group(1), 16)
        sass = run(cuobjdump, "-sass", "-arch", arch, library)
        pieces = re.split(r"(?m)^\s*Function : (\S+)$", sass)
        for name, text in zip(pieces[1::2], pieces[2::2], strict=True):
            row = rows[arch, name]
            row.hmma = len(re.findall(r"\bHMMA\.", text))
            row.wide_loads = len(re.findall(r"\b(?:LDG|STG|LDGSTS)\.\S*\b128\b", text))
            row.local_accesses = len(re.findall(r"\b(?:LDL|STL)\b", text))
    names = [name for _, name in rows]
    plain = run("c++filt", *dict.fromkeys(names)).splitlines()
    words = dict(zip(dict.fromkeys(names), plain, strict=True))
    enums = enumerators()
    for (_, name), row in rows.items():
        row.kernel = canonical(words[name], enums)
    return sorted(rows.values(), key=lambda row: (row.kernel, archs.index(row.arch)))


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
        dynamic = 0
        for shape in shapes:
            for kernel in shape.kernels:
                if kernel["kernel"] != row.kernel:
                    continue
                dynamic = max(dynamic, kernel["shared_bytes"])
                row.bytes_over_least = max(row.bytes_over_least or 0.0, round(shape.over_least, 3))
                row.sectors_per_request = max(row.sectors_per_request or 0.0, kernel["sectors_per_request"])
                row.bank_conflicts = max(row.bank_conflicts or 0, kernel["bank_conflicts"])
        row.shared_bytes += dynamic
        arch = ARCHITECTURES[row.arch]
        row.occupancy = round(arch.occupancy(row.threads, row.registers, row.shared_bytes), 3)


def faults(rows: list[Row]) -> list[str]:
    """What no shipped instance may do."""
    found = []
    for row in rows:
        if row.spill_bytes or row.local_accesses:
            found.append(f"{row.kernel} on {row.arch} uses local memory ({row.spill_bytes} bytes)")
        if row.kernel.startswith(("VerifySolve", "Prefill")) and row.hmma == 0:
            found.append(f"{row.kernel} on {row.arch} has no tensor-core instruction")
    return found


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
        "Kernels as compiled, and traffic as the executor counted it on standard shapes (-: not among them)"
    )
    lines = []
    for r in rows:
        numbers = (r.registers, r.shared_bytes, r.spill_bytes)
        facts = (r.hmma, r.wide_loads, r.local_accesses)
        traffic = (r.bytes_over_least, r.sectors_per_request, r.bank_conflicts)
        cells = [*map(str, numbers), f"{r.occupancy:.0%}", *map(str, facts), *map(counted, traffic)]
        lines.append([r.kernel, r.arch, *cells])
    resources, sass = "regs|shared|spill|occupancy", "HMMA|128-bit|local"
    table(f"kernel|arch|{resources}|{sass}|bytes/least|sectors/req|conflicts", lines)

    print("Standard shapes: bytes counted over all launches of an op, and the least possible")
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


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="also write the rows there")
    parser.add_argument("--build", type=Path, default=ROOT / "build/report", help="directory of the build")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    nvcc = find_tool("nvcc")
    archs = architectures(nvcc)
    library, program = build(options.build, archs, options.jobs)
    rows = compiled(library, archs)
    shapes = executed(program)
    join(rows, shapes)
    show(rows, shapes)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    found = faults(rows)
    for fault in found:
        print(f"fault: {fault}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
