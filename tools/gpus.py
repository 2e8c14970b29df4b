"""What GPUs can do, for occupancy and for predictions: limits of architectures, peaks of products."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """Limits of a multiprocessor: CUDA C++ Programming Guide, specifications per compute capability."""

    threads: int
    blocks: int
    shared_bytes: int  # of all resident blocks, 1 KiB of the runtime's for each included
    registers: int = 65536
    registers_unit: int = 256  # registers are given to a warp in multiples of this
    block_overhead: int = 1024

    def occupancy(self, threads: int, registers: int, shared_bytes: int) -> float:
        """Resident warps over the most possible, for blocks of `threads` threads."""
        warps = -(-threads // 32)
        of_warp = -(-registers * 32 // self.registers_unit) * self.registers_unit
        by_registers = self.registers // (of_warp * warps) if registers else self.blocks
        by_shared = self.shared_bytes // (shared_bytes + self.block_overhead)
        blocks = min(self.blocks, self.threads // (warps * 32), by_registers, by_shared)
        return blocks * warps * 32 / self.threads


ARCHITECTURES = {
    "sm_80": Architecture(threads=2048, blocks=32, shared_bytes=164 << 10),
    "sm_90": Architecture(threads=2048, blocks=32, shared_bytes=228 << 10),
    "sm_100": Architecture(threads=2048, blocks=32, shared_bytes=228 << 10),
    "sm_120": Architecture(threads=1536, blocks=24, shared_bytes=100 << 10),
}


@dataclass(frozen=True)
class Gpu:
    """Peaks from the vendor's data sheet, dense (without sparsity)."""

    name: str
    source: str
    bytes_per_second: float
    float32: float  # operations a second outside the tensor cores
    tf32: float
    bfloat16: float

    def microseconds(self, moved: float, flops: float, tf32: float, bfloat16: float) -> float:
        """The roofline: the slowest of memory and of each unit at its peak, nothing else counted."""
        units = flops / self.float32, tf32 / self.tf32, bfloat16 / self.bfloat16
        return 1e6 * max(moved / self.bytes_per_second, *units)


GPUS = [
    Gpu("A100", "NVIDIA A100 80GB SXM data sheet", 2.039e12, 19.5e12, 156e12, 312e12),
    Gpu("H100", "NVIDIA H100 SXM data sheet", 3.35e12, 67e12, 494e12, 989e12),
    Gpu("H200", "NVIDIA H200 SXM data sheet", 4.8e12, 67e12, 494e12, 989e12),
    Gpu("B200", "NVIDIA HGX B200 data sheet", 7.7e12, 75e12, 1100e12, 2250e12),
]
