"""What a GPU run was measured on: card, driver, clocks, versions, date, commit.

python bench/gpu/machine.py --json machine.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

QUERY = (
    "name", "driver_version", "compute_cap", "memory.total", "clocks.sm", "clocks.max.sm", "clocks.mem",
    "clocks.max.mem", "power.limit", "persistence_mode", "mig.mode.current", "utilization.gpu",
)  # fmt: skip


def said(*command: str) -> str | None:
    """What a command prints; None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def gpus() -> list[dict[str, str]]:
    """One entry a card, as nvidia-smi has it; empty without one."""
    lines = said("nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader")
    rows = [line.split(", ") for line in (lines or "").splitlines()]
    return [dict(zip(QUERY, row, strict=False)) for row in rows]


def installed(*packages: str) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def describe() -> dict[str, Any]:
    """All of it."""
    nvcc = said("nvcc", "--version")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": said("git", "describe", "--always", "--dirty"),
        "gpus": gpus(),
        "nvcc": nvcc.splitlines()[-1] if nvcc else None,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        **installed("torch", "triton", "flash-linear-attention", "fla-core", "nvidia-cutlass"),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What a GPU run was measured on.")
    parser.add_argument("--json", type=Path, help="write it there")
    target = parser.parse_args().json
    text = json.dumps(describe(), indent=1)
    print(text)
    if target is not None:
        target.write_text(text + "\n")
