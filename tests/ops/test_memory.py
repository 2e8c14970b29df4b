"""Nothing that an operator allocates grows with tokens x DK x DV."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from specdec import ops

PROC = Path("/proc/self")


def reset_peak() -> None:
    """Forgets the peak of the tests before, which would hide a growth below it."""
    (PROC / "clear_refs").write_text("5")


def peak_bytes() -> int:
    """Peak resident memory of this process since `reset_peak`."""
    found = re.search(r"VmHWM:\s+(\d+) kB", (PROC / "status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.skipif(not (PROC / "clear_refs").exists(), reason="reads the peak from Linux's /proc")
@pytest.mark.parametrize("strategy", ["serial", "hybrid", "solve", "prefill"])
def test_peak_memory_is_far_below_a_state_per_token(strategy):
    """A state per token would take 512 MiB here; outputs and factors take 6 MiB, scratch a few more."""
    B, N, H, D = 4, 64, 8, 256
    state = torch.randn(B, H, D, D)
    q, k, v = (torch.randn(B, N, H, D) for _ in range(3))
    g, beta = -torch.rand(B, N, H), torch.rand(B, N, H)
    parents = torch.tensor([[(i - 1) // 2 if i else -1 for i in range(N)]] * B, dtype=torch.int32)
    small = slice(0, 2)
    how = {"qk_l2norm": True, "scale": 1.0}
    # Library start-up, thread stacks and scratch are there before the measurement.
    if strategy == "prefill":
        ops.prefill(q[:, small], k[:, small], v[:, small], g[:, small], beta[:, small], state=state, **how)
    else:
        ops.verify(
            q[:, small], k[:, small], v[:, small], g[:, small], beta[:, small],
            state=state, strategy=strategy, **how,
        )  # fmt: skip
    reset_peak()
    before = peak_bytes()
    if strategy == "prefill":
        ops.prefill(q, k, v, g, beta, state=state, **how)
    else:
        ops.verify(q, k, v, g, beta, state=state, parents=parents, strategy=strategy, **how)
    per_token_states = B * N * H * D * D * 4
    allowed = 80 << 20
    assert per_token_states > 6 * allowed  # the test could tell
    assert peak_bytes() - before < allowed
