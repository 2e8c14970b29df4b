"""What a measurement ran on, in one line."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    except OSError:
        pass
    return platform.processor() or platform.machine()


def isa() -> str | None:
    """The instruction set of the CPU kernels on this machine; None where they are not built."""
    try:
        from specdec.ops import cpu_isa
    except ImportError:
        return None
    return cpu_isa()


def describe() -> str:
    """Processor, logical cores, threads, instruction set and torch version."""
    threads = torch.get_num_threads()
    parts = [
        cpu_model(),
        f"{os.cpu_count()} logical cores",
        "1 thread" if threads == 1 else f"{threads} threads",
        isa() or "no kernels",
        f"torch {torch.__version__}",
    ]
    return ", ".join(parts)
