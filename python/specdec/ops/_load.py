"""Loads the operator libraries, once, when `specdec.ops` is imported."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

LIBRARY = Path(__file__).resolve().parent.parent / "_lib" / "libspecdec_cpu.so"
CUDA_LIBRARY = LIBRARY.with_name("libspecdec_cuda.so")  # needs a torch with CUDA, and may not be built


def load() -> None:
    """Registers the `specdec` operators with torch.

    Raises:
        ImportError: the library was not built; the message says how to build it.
        ValueError: SPECDEC_CPU_ISA in the environment names no instruction set that runs here.
    """
    if not LIBRARY.exists():
        raise ImportError(
            f"{LIBRARY.name} is not built: run `make build` in the repository, "
            "or `pip install --no-build-isolation .`"
        )
    torch.ops.load_library(str(LIBRARY))  # type: ignore[no-untyped-call]
    asked = os.environ.get("SPECDEC_CPU_ISA")
    if asked and asked != cpu_isa():  # the library runs the widest set then, which is not what was asked for
        narrower = " or ".join(cpu_isa_builds()[: cpu_isa_builds().index(cpu_isa()) + 1])
        raise ValueError(f"SPECDEC_CPU_ISA: got {asked!r}, want {narrower} on this machine (or unset it)")
    if cuda_loaded():
        torch.ops.load_library(str(CUDA_LIBRARY))  # type: ignore[no-untyped-call]


def cuda_loaded() -> bool:
    """Whether the operators take CUDA tensors: torch has CUDA and the library of CUDA operators was built."""
    return torch.version.cuda is not None and CUDA_LIBRARY.exists()


def cpu_isa() -> str:
    """The instruction set of the CPU kernels on this machine: "avx512", "avx2" or "portable"."""
    return _c_string("specdec_cpu_isa")


def cpu_isa_builds() -> list[str]:
    """The instruction sets that the library holds kernels for."""
    return _c_string("specdec_cpu_isa_builds").split(",")


def _c_string(symbol: str) -> str:
    function = ctypes.CDLL(str(LIBRARY))[symbol]
    function.restype = ctypes.c_char_p
    return str(function().decode())
