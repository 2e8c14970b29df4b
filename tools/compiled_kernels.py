"""What the compiler made of kernels: registers, local memory, instructions of every kernel of an object file.

`read_object` asks cuobjdump and nvdisasm; `parse_usage`, `parse_sass` and `parse_threads` read what they say.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# The runtime keeps a KiB of shared memory of every block from sm_90 on; it is in SHARED and not the kernel's.
RUNTIME_SHARED_BYTES = 1024
MAX_THREADS_ATTRIBUTE = 0x05  # EIATTR_MAX_THREADS of .nv.info


@dataclass
class Kernel:
    """One kernel on one architecture."""

    kernel: str
    arch: str
    registers: int = 0
    shared_bytes: int = 0  # static
    spill_bytes: int = 0  # local memory of a thread: spills and arrays
    threads: int = 0  # of a block
    hmma: int = 0  # instructions of the tensor cores
    wide_loads: int = 0  # loads of 16 bytes from global memory, asynchronous copies included
    local_accesses: int = 0


class ToolError(Exception):
    """A tool is missing or failed."""


def find_tool(name: str) -> str:
    """Path of nvcc, cuobjdump or nvdisasm: from PATH, beside nvcc, or of their pip packages."""
    found = shutil.which(name)
    candidates = [Path(found)] if found else []
    candidates.append(Path("/usr/local/cuda/bin") / name)
    for place in map(Path, sys.path):
        candidates += [
            *sorted(place.glob(f"nvidia/cu*/bin/{name}")),
            place / f"nvidia/cuda_{name}/bin/{name}",
        ]
    for candidate in candidates:
        if candidate.is_file():
            return str(candidate)
    raise ToolError(f"{name} was not found; pip install nvidia-cuda-{name}")


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Standard output of a command.

    Raises:
        ToolError: it failed; with its last lines.
    """
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=cwd)
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise ToolError(f"{tail}\n{command[0]} failed")
    return done.stdout


def parse_usage(text: str) -> list[Kernel]:
    """Kernels of `cuobjdump -res-usage`, by their mangled names."""
    kernels = []
    for part in re.split(r"(?m)^\s*arch = ", text)[1:]:
        arch = part.split("\n", 1)[0].strip()
        for name, line in re.findall(r"(?m)^\s*Function (\S+):\s*\n(.*)$", part):
            used = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", line)}
            kept = RUNTIME_SHARED_BYTES if int(arch.removeprefix("sm_")) >= 90 else 0
            kernel = Kernel(name, arch, registers=used["REG"], shared_bytes=max(0, used["SHARED"] - kept))
            kernel.spill_bytes = used["STACK"] + used["LOCAL"]
            kernels.append(kernel)
    return kernels


def parse_sass(lines: Iterable[str], kernels: dict[str, Kernel]) -> None:
    """Counts the instructions that `nvdisasm -c` lists, for the kernels of these mangled names."""
    kernel = None
    for line in lines:
        if line.startswith(".text."):
            kernel = kernels.get(line[len(".text.") :].rstrip().rstrip(":"))
        elif kernel is not None and line.lstrip().startswith("/*"):
            kernel.hmma += " HMMA." in line
            kernel.wide_loads += " LDG." in line and ".128" in line
            kernel.wide_loads += " LDGSTS." in line and ".128" in line
            kernel.local_accesses += " LDL" in line or " STL" in line


def parse_threads(cubin: bytes) -> dict[str, int]:
    """Threads of a block by kernel, from the launch bounds in a cubin (ELF, 64 bits)."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    # Of a section: offset of the name, then offset and size of the contents.
    sections = [struct.unpack_from("<I20xQQ", cubin, table + i * size) for i in range(count)]
    names_at = sections[names_index][1]
    threads = {}
    for name_offset, begin, length in sections:
        name = cubin[names_at + name_offset : cubin.index(b"\0", names_at + name_offset)].decode()
        if not name.startswith(".nv.info."):
            continue
        at = begin
        while at < begin + length:
            form, attribute, value = struct.unpack_from("<BBH", cubin, at)
            if attribute == MAX_THREADS_ATTRIBUTE:
                (threads[name.removeprefix(".nv.info.")],) = struct.unpack_from("<I", cubin, at + 4)
            at += 4 + (value if form == 4 else 0)  # 4: `value` bytes follow; others hold it in the header
    return threads


def read_object(path: Path) -> list[Kernel]:
    """The kernels of an object file or library, for all its architectures, by their mangled names."""
    kernels = parse_usage(run(find_tool("cuobjdump"), "-res-usage", path))
    if not kernels:
        return []
    with tempfile.TemporaryDirectory() as scratch:
        run(find_tool("cuobjdump"), "-xelf", "all", path.resolve(), cwd=Path(scratch))
        for cubin in sorted(Path(scratch).glob("*.cubin")):
            arch = re.findall(r"sm_\d+", cubin.name)[-1]
            of_arch = {kernel.kernel: kernel for kernel in kernels if kernel.arch == arch}
            for name, threads in parse_threads(cubin.read_bytes()).items():
                if name in of_arch:
                    of_arch[name].threads = threads
            command = [find_tool("nvdisasm"), "-c", str(cubin)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as disassembler:
                assert disassembler.stdout is not None
                parse_sass(disassembler.stdout, of_arch)
            if disassembler.returncode != 0:
                raise ToolError(f"{command[0]} failed on {path.name}")
    return kernels


def faults(kernel: Kernel, name: str) -> list[str]:
    """What no shipped instance may do; `name` in plain words."""
    found = []
    if kernel.spill_bytes or kernel.local_accesses:
        found.append(f"{name} on {kernel.arch} uses local memory ({kernel.spill_bytes} bytes a thread)")
    if name.startswith(("VerifySolve", "Prefill")) and kernel.hmma == 0:
        found.append(f"{name} on {kernel.arch} has no tensor-core instruction")
    if name.startswith(("Verify", "Prefill", "Commit")) and kernel.wide_loads == 0:
        found.append(f"{name} on {kernel.arch} has no load of 16 bytes")
    return found
