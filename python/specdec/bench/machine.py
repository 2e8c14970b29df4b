"""What a measurement ran on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

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


def machine() -> dict[str, Any]:
    """Processor, logical cores, threads, instruction set and torch version, for a JSON file."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "isa": isa(),
        "torch": torch.__version__,
    }


def describe() -> str:
    """`machine` in one line."""
    about = machine()
    threads = about["threads"]
    parts = [
        about["cpu"],
        f"{about['cores']} logical cores",
        "1 thread" if threads == 1 else f"{threads} threads",
        about["isa"] or "no kernels",
        f"torch {about['torch']}",
    ]
    return ", ".join(parts)
