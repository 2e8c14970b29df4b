"""What the operators refuse beyond shapes and values: shared memory, gradients, devices, wrong types; and
what a length of 0 means beside a pending commit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.backends import COMPILED, Backend
from ops.cases import int32, random_factors
from specdec import ops
from specdec.ops import ConvPending, ConvPrefix, Factors, PackedWeight, Pending, Prefix, pack_weight
from specdec.ops._operator import argument_names

B, N, HK, HV, DK, DV, C, W = 2, 3, 1, 2, 32, 64, 8, 4
OPS = (
    *("verify", "verify_deferred", "commit", "prefill", "conv_verify", "conv_verify_deferred", "conv_commit"),
    *("linear", "rms_norm_linear", "swiglu_linear", "rms_norm", "swiglu", "gated_delta_gates"),
)
backends = pytest.mark.parametrize("backend", COMPILED, ids=str)


def f32(*shape: int) -> Tensor:
    return torch.ones(shape)


def factors() -> Factors:
    return Factors(f32(B, N, HK, DK), f32(B, N, HV, DV), f32(B, N, HV))


# --- a written tensor shares no memory with what is read ---


def carve(memory: Tensor, at: int, like: Tensor) -> Tensor:
    """A tensor of like's shape and dtype inside `memory`, from its float `at` on."""
    return memory[at : at + like.numel()].view(like.dtype).view(like.shape)


WRITES: dict[str, Callable[..., Any]] = {
    "commit": lambda state, k, u, g, path, path_lengths, slots: ops.commit(
        state, Factors(k, u, g), path, path_lengths, slots=slots
    ),
    "prefill": lambda state, **tokens: ops.prefill(state=state, **tokens),
    "verify": lambda state, k_, u_, g_, path, path_lengths, **tokens: ops.verify(
        state=state, pending=Pending(Factors(k_, u_, g_), path, path_lengths), **tokens
    ),
    "conv_commit": lambda state, **rest: ops.conv_commit(state, **rest),
    "conv_verify": lambda state, x_, path, path_lengths, **rest: ops.conv_verify(
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


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, read in READ.items() for name in read])
def test_written_memory_is_not_read(op: str, name: str) -> None:
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
            WRITES[op](state=state, **{**arguments, key: inside})
        assert torch.equal(memory.view(torch.int32), before.view(torch.int32))
    memory = torch.zeros(size + tensor.numel())
    after = carve(memory, size, tensor).copy_(tensor)
    WRITES[op](state=memory[:size].view(shape), **{**arguments, key: after})  # next to it is not in it


@pytest.mark.parametrize("gap", [0, 1, 31])
def test_memory_between_slots_is_free(gap: int) -> None:
    """A pool whose slots are parts of larger records: what lies between them may be an input."""
    slot, width = (W - 1) * C, (W - 1) * C + C + gap
    memory = torch.zeros(5 * width)
    pool = memory.as_strided((5, W - 1, C), (width, C, 1))
    x = memory[3 * width + slot :][:C].view(1, 1, C).fill_(2.0)
    ops.conv_commit(pool, x, slots=int32([3]))
    assert torch.equal(pool[3, -1], x[0, 0])
    for start in (3 * width + slot - 1, 4 * width - C + 1):  # one float into a slot, at either end
        with pytest.raises(ValueError, match="x: got a tensor that shares memory with conv_state"):
            ops.conv_commit(pool, memory[start:][:C].view(1, 1, C), slots=int32([0]))


def test_reading_shared_memory_is_fine() -> None:
    """A verification without pending writes nothing, so its inputs may lie anywhere."""
    state = torch.randn(1, 1, 32, 32)
    v = state.view(1, 32, 1, 32)[:, :4]
    q = torch.randn(1, 4, 1, 32)
    out, _ = ops.verify(q, q, v, state=state)
    assert torch.equal(out, ops.verify(q, q, v.clone(), state=state)[0])


# --- gradients ---


def verify_arguments() -> dict[str, Any]:
    tokens = {name: f32(*shape) for name, shape in TOKENS.items()}
    return {**tokens, "g": -f32(B, N, HV), "state": f32(B, HV, DV, DK), "strategy": "serial"}


PACKED = pack_weight(f32(6, 4))
PARAMETER = torch.nn.Parameter(f32(4))
WITH_GRAD = f32(2, 4).requires_grad_()
DENSE: list[tuple[str, Callable[[], Any]]] = [
    ("x", lambda: ops.linear(WITH_GRAD, PACKED)),
    ("residual", lambda: ops.linear(f32(2, 4), PACKED, residual=f32(2, 6).requires_grad_())),
    ("weight", lambda: ops.linear(f32(2, 4), PackedWeight(PACKED.data.clone().requires_grad_(), None, 4, 6))),
    ("norm_weight", lambda: ops.rms_norm_linear(f32(2, 4), PARAMETER, 1e-6, PACKED)),
    ("x", lambda: ops.swiglu_linear(f32(2, 8).requires_grad_(), PACKED)),
    ("weight", lambda: ops.rms_norm(f32(2, 4), PARAMETER, 1e-6)),
    ("gate", lambda: ops.rms_norm(f32(2, 4), f32(4), 1e-6, WITH_GRAD)),
    ("x", lambda: ops.swiglu(WITH_GRAD)),
    ("A_log", lambda: ops.gated_delta_gates(f32(2, 4), f32(2, 4), PARAMETER, f32(4))),
]


@pytest.mark.parametrize(("name", "call"), DENSE)
def test_dense_ops_refuse_gradients(name: str, call: Callable[[], Any]) -> None:
    with pytest.raises(
        ValueError, match=rf"^{name}: got a tensor that requires grad, want inference: .*no_gr"
    ):
        call()
    with torch.no_grad():
        without = call()
    with torch.inference_mode():
        inference = call()
    pairs = [(without, inference)] if isinstance(without, Tensor) else zip(without, inference, strict=True)
    for a, b in pairs:
        assert torch.equal(a, b)
        assert not a.requires_grad
        assert not b.requires_grad


@pytest.mark.parametrize("name", ["q", "beta", "state"])
def test_verify_refuses_gradients(name: str) -> None:
    arguments = verify_arguments()
    arguments[name] = arguments[name].requires_grad_()
    with pytest.raises(ValueError, match=f"^{name}: got a tensor that requires grad"):
        ops.verify(**arguments)
    with torch.no_grad():
        out, _ = ops.verify(**arguments)
    assert not out.requires_grad
    pending = Pending(factors()._replace(u=f32(B, N, HV, DV).requires_grad_()))
    with pytest.raises(ValueError, match=r"^pending.factors.u: got a tensor that requires grad"):
        ops.verify(**verify_arguments(), pending=pending)


def test_compiled_code_refuses_gradients() -> None:
    """Compiled code would run its forward without grad mode: the check has to be part of what is traced."""

    @torch.compile(backend="aot_eager")
    def norm(x: Tensor) -> Tensor:
        return ops.rms_norm(x, PARAMETER, 1e-6)

    with pytest.raises(Exception, match="weight: got a tensor that requires grad"):
        norm(f32(2, 4))
    with torch.no_grad():
        assert torch.equal(norm(f32(2, 4)), ops.rms_norm(f32(2, 4), PARAMETER, 1e-6))


# --- devices and types ---


def raw_arguments(op: str) -> list[Any]:
    """Arguments by their type alone: what these tests refuse is refused before a shape is looked at."""
    values = {"Tensor": f32(2), "Optional[Tensor]": f32(2), "int": 1, "bool": True}
    return [
        values.get(str(argument.type), 1.0)
        for argument in getattr(torch.ops.specdec, op).default._schema.arguments
    ]


@pytest.mark.parametrize("op", OPS)
def test_every_operand_is_on_one_device(op: str) -> None:
    """The fake kernel answers as soon as one operand has no data, so it has to look at all of them."""
    arguments, names = raw_arguments(op), argument_names(op)
    tensors = [i for i, value in enumerate(arguments) if isinstance(value, Tensor)]
    for i in tensors[1:]:
        wrong = list(arguments)
        wrong[i] = f32(2).to("meta")
        with pytest.raises(
            ValueError, match=f"^{names[i]}: got a tensor on meta, want cpu as the first argument"
        ):
            getattr(torch.ops.specdec, op)(*wrong)


@pytest.mark.parametrize("op", OPS)
def test_wrong_types_are_named(op: str) -> None:
    arguments, names = raw_arguments(op), argument_names(op)
    call = ops._operator.operator(op)
    for i, name in enumerate(names):
        with pytest.raises(
            TypeError, match=rf"^{name}: got object, want (a tensor|a number|an integer|True or)"
        ):
            call(*arguments[:i], object(), *arguments[i + 1 :])


def test_operator_names_are_those_of_the_wrappers() -> None:
    deferred = argument_names("verify_deferred")
    assert [n for n in deferred if n.startswith("pending")] == [
        "pending.factors.k", "pending.factors.u", "pending.factors.g", "pending.path", "pending.path_lengths"
    ]  # fmt: skip
    assert argument_names("commit")[:4] == ["state", "factors.k", "factors.u", "factors.g"]
    assert argument_names("commit")[-1] == "mode"
    assert argument_names("conv_verify")[-3:] == ["prefix.x", "prefix.parents", "activation"]


NONE = [(name, {name: None}) for name in ("q", "k", "v", "state")]
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("scale: got str, want a number or None", {"scale": "a"}),
    ("pending: got Factors, want Pending", {"pending": factors()}),
    ("pending.factors: got Tensor, want Factors", {"pending": Pending(f32(3))}),
    ("prefix: got tuple, want Prefix", {"prefix": (factors(), None)}),
    ("prefix.factors.k: got NoneType, want Tensor", {"prefix": Prefix(Factors(None, f32(1)))}),
    ("prefix.factors: got NoneType, want Factors", {"prefix": Prefix(None)}),
    ("slots: got list, want a tensor or None", {"slots": [0, 1]}),
]


@pytest.mark.parametrize("strategy", ["serial", "auto"])
@pytest.mark.parametrize(("name", "change"), NONE)
def test_no_tensor(name: str, change: dict[str, Any], strategy: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: got None, want a tensor$"):
        ops.verify(**{**verify_arguments(), "strategy": strategy, **change})


@pytest.mark.parametrize(("message", "change"), WRONG)
def test_wrong_types(message: str, change: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"^{message}$"):
        ops.verify(**{**verify_arguments(), **change})


def test_more_wrong_types() -> None:
    state, x = f32(B, HV, DV, DK), f32(B, N, C)
    with pytest.raises(TypeError, match=r"^factors: got tuple, want Factors$"):
        ops.commit(state, tuple(factors()))
    for unit in ("k", "u"):
        with pytest.raises(ValueError, match=f"^factors.{unit}: got None, want a tensor$"):
            ops.commit(state, factors()._replace(**{unit: None}))
    window = {"weight": f32(C, W), "conv_state": f32(B, W - 1, C)}
    with pytest.raises(TypeError, match=r"^pending: got Tensor, want ConvPending$"):
        ops.conv_verify(x, **window, pending=x)
    with pytest.raises(TypeError, match=r"^prefix: got Tensor, want ConvPrefix$"):
        ops.conv_verify(x, **window, prefix=x)
    with pytest.raises(TypeError, match=r"^prefix.x: got NoneType, want Tensor$"):
        ops.conv_verify(x, **window, prefix=ConvPrefix(None))
    with pytest.raises(TypeError, match=r"^weight: got Tensor, want PackedWeight$"):
        ops.linear(f32(2, 4), f32(6, 4))
    with pytest.raises(TypeError, match=r"^weight: got NoneType, want Tensor or Sequence$"):
        pack_weight(None)
    with pytest.raises(TypeError, match=r"^weight: got int, want Tensor$"):
        pack_weight([f32(2, 2), 3])


# --- a length of 0 beside a pending commit ---


@backends
@pytest.mark.parametrize("strategy", ["serial", "hybrid", "solve"])
def test_no_new_nodes_still_settle_what_is_pending(backend: Backend, strategy: str) -> None:
    """Row 0 has a pending path and no new nodes, row 1 neither, row 2 new nodes and nothing pending."""
    rng = torch.Generator().manual_seed(5)
    rows, slots = 3, int32([2, 0, 3])
    state = torch.randn(4, HV, DV, DK, generator=rng)
    state[0] = torch.nan  # neither read nor written
    made = random_factors(rng, rows, N, HK, HV, DK, DV, "head")
    counts, lengths = int32([2, 0, 0]), int32([0, 0, N])
    q, k, v = (torch.randn(rows, N, h, d, generator=rng) for h, d in ((HK, DK), (HK, DK), (HV, DV)))
    g, beta = -torch.rand(rows, N, HV, generator=rng), torch.rand(rows, N, HV, generator=rng)
    for t in (q, k, v, g, beta):
        t[:2] = torch.nan

    want = state.clone()
    backend.commit(want, made, None, counts, slots=slots)
    out, fresh = backend.verify(
        q, k, v, g, beta, state=state, slots=slots, lengths=lengths, strategy=strategy,
        pending=Pending(made, None, counts),
    )  # fmt: skip
    assert torch.equal(state.view(torch.int32), want.view(torch.int32))
    assert not torch.equal(state[2], torch.zeros_like(state[2]))
    assert all((t[:2] == 0).all() and (t[2] != 0).any() for t in (out, *fresh))


@backends
def test_no_new_inputs_still_settle_what_is_pending(backend: Backend) -> None:
    window = torch.randn(B, W - 1, C)
    window[1] = torch.nan
    want, x = window.clone(), torch.full((B, N, C), torch.nan)
    pending, counts = torch.randn(B, N, C), int32([2, 0])
    backend.conv_commit(want, pending, None, counts)
    y = backend.conv_verify(
        x, f32(C, W), conv_state=window, lengths=int32([0, 0]), pending=ConvPending(pending, None, counts)
    )
    assert torch.equal(window.view(torch.int32), want.view(torch.int32))
    assert torch.equal(window[0, 1:], pending[0, :2])
    assert (y == 0).all()
