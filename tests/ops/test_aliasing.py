"""What an operator writes shares no memory with what it reads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.backends import COMPILED, Backend
from ops.cases import bits, int32
from specdec.ops import ConvPending, Factors, Pending

backends = pytest.mark.parametrize("backend", COMPILED)

B, N, HK, HV, DK, DV, C, W = 2, 3, 1, 2, 32, 64, 8, 4


def f32(*shape: int) -> Tensor:
    return torch.ones(shape)


def carve(memory: Tensor, at: int, like: Tensor) -> Tensor:
    """A tensor of like's shape and dtype inside `memory`, from its float `at` on."""
    return memory[at : at + like.numel()].view(like.dtype).view(like.shape)


WRITES: dict[str, Callable[..., Any]] = {
    "commit": lambda ops, state, k, u, g, path, path_lengths, slots: ops.commit(
        state, Factors(k, u, g), path, path_lengths, slots=slots
    ),
    "prefill": lambda ops, state, **tokens: ops.prefill(state=state, **tokens),
    "verify": lambda ops, state, k_, u_, g_, path, path_lengths, **tokens: ops.verify(
        state=state, pending=Pending(Factors(k_, u_, g_), path, path_lengths), **tokens
    ),
    "conv_commit": lambda ops, state, **rest: ops.conv_commit(state, **rest),
    "conv_verify": lambda ops, state, x_, path, path_lengths, **rest: ops.conv_verify(
        conv_state=state, pending=ConvPending(x_, path, path_lengths), **rest
    ),
}
TOKENS = {
    "q": (B, N, HK, DK), "k": (B, N, HK, DK), "v": (B, N, HV, DV), "g": (B, N, HV), "beta": (B, N, HV)
}  # fmt: skip
FACTORS = {"k": (B, N, HK, DK), "u": (B, N, HV, DV), "g": (B, N, HV)}
ROWS = {"slots": int32([0, 1]), "lengths": int32([1, 1])}
PATH = {"path": int32([[0], [0]]), "path_lengths": int32([1, 1])}
CONV = {"weight": f32(C, W), "bias": f32(C), "parents": int32([[-1, 0, 1]] * B)}
# What every op reads, by the name that its error gives.
READ: dict[str, dict[str, tuple[str, Tensor]]] = {
    "commit": {
        **{f"factors.{n}": (n, f32(*shape)) for n, shape in FACTORS.items()},
        **{n: (n, t) for n, t in {**PATH, "slots": ROWS["slots"]}.items()},
    },
    "prefill": {
        **{n: (n, f32(*shape)) for n, shape in TOKENS.items()},
        **{n: (n, t) for n, t in ROWS.items()},
    },
    "verify": {
        **{n: (n, f32(*shape)) for n, shape in TOKENS.items()},
        **{f"pending.factors.{n}": (f"{n}_", f32(*shape)) for n, shape in FACTORS.items()},
        **{f"pending.{n}": (n, t) for n, t in PATH.items()},
        **{n: (n, t) for n, t in {**ROWS, "parents": CONV["parents"]}.items()},
    },
    "conv_commit": {
        "x": ("x", f32(B, N, C)),
        **{n: (n, t) for n, t in {**PATH, "slots": ROWS["slots"]}.items()},
    },
    "conv_verify": {
        "x": ("x", f32(B, N, C)),
        **{n: (n, t) for n, t in {**CONV, **ROWS}.items()},
        "pending.x": ("x_", f32(B, N, C)),
        **{f"pending.{n}": (n, t) for n, t in PATH.items()},
    },
}


@backends
@pytest.mark.parametrize(("op", "name"), [(op, name) for op, read in READ.items() for name in read])
def test_written_memory_is_not_read(backend: Backend, op: str, name: str) -> None:
    shape = (B, W - 1, C) if op.startswith("conv") else (B, HV, DV, DK)
    pool_name = "conv_state" if op.startswith("conv") else "state"
    size = math.prod(shape)
    arguments = dict(READ[op].values())
    key, tensor = READ[op][name]
    for at in (0, size - 1):  # the whole of it inside the pool; only its first element
        memory = torch.zeros(size + tensor.numel())
        inside = carve(memory, at, tensor).copy_(tensor)
        state = memory[:size].view(shape)
        before = memory.clone()
        want = f"^{name}: got a tensor that shares memory with {pool_name}, which is written, want memory of"
        with pytest.raises(ValueError, match=want):
            WRITES[op](backend, state=state, **{**arguments, key: inside})
        assert torch.equal(bits(memory), bits(before))
    memory = torch.zeros(size + tensor.numel())
    after = carve(memory, size, tensor).copy_(tensor)
    WRITES[op](
        backend, state=memory[:size].view(shape), **{**arguments, key: after}
    )  # next to it is not in it


@backends
@pytest.mark.parametrize("gap", [0, 1, 31])
def test_memory_between_slots_is_free(backend: Backend, gap: int) -> None:
    """A pool whose slots are parts of larger records: what lies between them may be an input."""
    slot, width = (W - 1) * C, (W - 1) * C + C + gap
    memory = torch.zeros(5 * width)
    pool = memory.as_strided((5, W - 1, C), (width, C, 1))
    x = memory[3 * width + slot :][:C].view(1, 1, C).fill_(2.0)
    backend.conv_commit(pool, x, slots=int32([3]))
    assert torch.equal(pool[3, -1], x[0, 0])
    for start in (3 * width + slot - 1, 4 * width - C + 1):  # one float into a slot, at either end
        with pytest.raises(ValueError, match="x: got a tensor that shares memory with conv_state"):
            backend.conv_commit(pool, memory[start:][:C].view(1, 1, C), slots=int32([0]))


@backends
def test_reading_shared_memory_is_fine(backend: Backend) -> None:
    """A verification without pending writes nothing, so its inputs may lie anywhere."""
    state = torch.randn(1, 1, 32, 32)
    v = state.view(1, 32, 1, 32)[:, :4]
    q = torch.randn(1, 4, 1, 32)
    out, _ = backend.verify(q, q, v, state=state)
    assert torch.equal(out, backend.verify(q, q, v.clone(), state=state)[0])
