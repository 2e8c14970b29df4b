"""Every argument check: one error with the argument, what was given and what is wanted. A ValueError, or a
TypeError where no value of that type would do.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.backends import COMPILED, UNCHECKED, Backend
from ops.cases import int32
from specdec import ops
from specdec.ops import ConvPending, ConvPrefix, Factors, Pending, Prefix, pack_weight
from specdec.ops._operator import argument_error, argument_names, operator

backends = pytest.mark.parametrize("backend", COMPILED)
B, N, HK, HV, DK, DV = 2, 3, 1, 2, 32, 64


def f32(*shape: int) -> Tensor:
    return torch.ones(shape)


def factors(n: int = N) -> Factors:
    return Factors(f32(B, n, HK, DK), f32(B, n, HV, DV), f32(B, n, HV))


def call(arguments: dict[str, Any], function: Callable[..., Any], message: str, written: str) -> None:
    before = arguments[written].clone()
    with pytest.raises(ValueError, match=message) as caught:
        function(**arguments)
    text = str(caught.value)
    assert "csrc" not in text
    assert "\n" not in text
    assert re.match(r"[\w.]+: ", text), f"starts with the argument: {text}"
    assert torch.equal(arguments[written], before)


VERIFY: list[tuple[str, dict[str, Any], str]] = [
    ("q dim", {"q": f32(B, N, DK)}, r"q: got shape \[2, 3, 32\], want \[B, N, HK, DK\]"),
    ("k shape", {"k": f32(B, N, HK, 64)}, r"k: got shape \[2, 3, 1, 64\], want the shape of q"),
    ("v shape", {"v": f32(B, 4, HV, DV)}, r"v: got shape \[2, 4, 2, 64\], want \[B, N, HV, DV\]"),
    (
        "heads",
        {"q": f32(B, N, 3, DK), "k": f32(B, N, 3, DK)},
        r"v: got 2 value heads, want a multiple of the 3",
    ),
    (
        "DK",
        {"q": f32(B, N, HK, 48), "k": f32(B, N, HK, 48)},
        r"k: got DK = 48, want 32, 64, 96, 128, 192 or 256",
    ),
    ("DV", {"v": f32(B, N, HV, 544)}, r"v: got DV = 544, want a multiple of 32 up to 512"),
    ("q dtype", {"q": f32(B, N, HK, DK).double()}, r"q: got dtype Double, want float32, bfloat16 or float16"),
    ("k dtype", {"k": f32(B, N, HK, DK).bfloat16()}, r"k: got dtype BFloat16, want Float"),
    ("v dtype", {"v": f32(B, N, HV, DV).half()}, r"v: got dtype Half, want Float"),
    ("q stride", {"q": f32(B, N, HK, 2 * DK)[..., ::2]}, r"q: the last dimension has stride 2, want 1"),
    (
        "v stride",
        {"v": f32(B, N, HV, 2 * DV)[..., ::2]},
        r"v: the last dimension has stride 2, want 1 \(call",
    ),
    ("g dtype", {"g": f32(B, N, HV).bfloat16()}, r"g: got dtype BFloat16, want Float"),
    ("g shape", {"g": f32(B, N, 3)}, r"g: got shape \[2, 3, 3\], want \[B, N, HV\] = \[2, 3, 2\]"),
    ("g channels", {"g": f32(B, N, HV, 31)}, r"g: got shape .* want \[B, N, HV, DK\] = \[2, 3, 2, 32\]"),
    ("g stride", {"g": f32(B, N, 4)[..., ::2]}, r"g: the last dimension has stride 2"),
    ("beta dtype", {"beta": f32(B, N, HV).half()}, r"beta: got dtype Half, want Float"),
    ("beta shape", {"beta": f32(B, N)}, r"beta: got shape \[2, 3\], want \[B, N, HV\]"),
    ("beta stride", {"beta": f32(B, N, 4)[..., ::2]}, r"beta: the last dimension has stride 2"),
    ("state dtype", {"state": f32(B, HV, DV, DK).half()}, r"state: got dtype Half, want float32 or bfloat16"),
    ("state shape", {"state": f32(B, HV, DK, DV)}, r"state: got shape .* want \[S, HV, DV, DK\]"),
    ("state stride", {"state": f32(B, HV, DK, DV).mT}, r"state: dimension 3 has stride 64, want 1"),
    ("no slots", {"state": f32(5, HV, DV, DK)}, r"slots: got None with 2 rows and 5 slots in state"),
    ("slots dtype", {"slots": torch.tensor([0, 1])}, r"slots: got dtype Long, want Int"),
    ("slots shape", {"slots": int32([0])}, r"slots: got shape \[1\], want \[B\] = \[2\]"),
    ("slots stride", {"slots": int32([0, 9, 1])[::2]}, r"slots: got a non-contiguous tensor"),
    ("slots range", {"slots": int32([0, 2])}, r"slots: row 1 is 2, want less than the 2 slots of state"),
    ("slots twice", {"slots": int32([1, 1])}, r"slots: slot 1 is named by two rows, want distinct slots"),
    ("parents dtype", {"parents": torch.zeros(B, N)}, r"parents: got dtype Float, want Int"),
    ("parents shape", {"parents": int32([[-1, 0]] * B)}, r"parents: got shape \[2, 2\], want \[B, N\]"),
    (
        "parents self",
        {"parents": int32([[-1, 0, 1], [-1, 1, 1]])},
        r"parents: row 1 node 1 is 1, want -1 \(a root\) or an earlier node",
    ),
    ("parents low", {"parents": int32([[-2, 0, 1]] * B)}, r"parents: row 0 node 0 is -2, want -1"),
    ("lengths shape", {"lengths": int32([1, 2, 3])}, r"lengths: got shape \[3\], want \[B\]"),
    ("lengths dtype", {"lengths": torch.tensor([1, 2])}, r"lengths: got dtype Long, want Int"),
    (
        "strategy",
        {"strategy": "fastest"},
        r"strategy: got 'fastest', want 'serial', 'hybrid', 'solve', 'exact' or",
    ),
    ("precision", {"precision": "tf32"}, r"precision: got 'tf32'.* want 'ieee'"),
    (
        "both",
        {"pending": Pending(factors()), "prefix": Prefix(factors())},
        r"prefix: got both pending and prefix",
    ),
    (
        "pending shape",
        {"pending": Pending(factors()._replace(u=f32(B, 4, HV, DV)))},
        r"pending.factors.u: got shape",
    ),
    (
        "pending dtype",
        {"pending": Pending(factors()._replace(k=f32(B, N, HK, DK).half()))},
        r"pending.factors.k: got d",
    ),
    (
        "pending gate",
        {"pending": Pending(factors()._replace(g=None))},
        r"pending.factors.g: got none, want per head",
    ),
    (
        "pending stride",
        {"pending": Pending(factors()._replace(k=f32(B, 5, HK, DK)[:, :N]))},
        r"pending.factors.k: got a non-contiguous tensor, want contiguous \(call .contiguous\(\)\)",
    ),
    (
        "pending path",
        {"pending": Pending(factors(), int32([[0, 3]] * B))},
        r"pending.path: row 0 entry 1 is 3, want a node in \[0, 3\)",
    ),
    (
        "pending path order",
        {"pending": Pending(factors(), int32([[0, 1], [2, 1]]))},
        r"pending.path: row 1 entry 1 is 1 after 2, want a path from root to leaf",
    ),
    (
        "pending lengths",
        {"pending": Pending(factors(), None, int32([1]))},
        r"pending.path_lengths: got shape \[1\]",
    ),
    (
        "written overlap",
        {"pending": Pending(factors()), "state": f32(1, HV, DV, DK).expand(B, -1, -1, -1)},
        r"state: the slot stride is 0, want at least 4096: slots that overlap cannot be written",
    ),
    (
        "prefix parents",
        {"prefix": Prefix(factors(), int32([[-1, 0, 2]] * B))},
        r"prefix.parents: row 0 node 2 is 2, want -1",
    ),
    (
        "prefix ids",
        {"prefix": Prefix(factors()), "parents": int32([[2, 3, 5]] * B)},
        r"parents: row 0 node 2 is 5, want -1 \(a root\) or an earlier node \(0 to 4\)",
    ),
    (
        "prefix gate",
        {"prefix": Prefix(factors()._replace(g=f32(B, N, HV, DK)))},
        r"prefix.factors.g: got per channel, want per head",
    ),
    (
        "prefix solve",
        {"prefix": Prefix(factors()), "strategy": "solve"},
        r"prefix: got a prefix with strategy solve",
    ),
    (
        "prefix count",
        {"prefix": Prefix(factors(62))},
        r"q: got 3 new nodes and 62 prefix nodes, want at most 64",
    ),
    ("device", {"state": torch.ones(B, HV, DV, DK, device="meta")}, r"state: got a tensor on meta, want c"),
    ("layout", {"v": f32(B, N, HV, DV).to_sparse()}, r"v: got a tensor of layout torch.sparse_coo, want"),
]
# What only a look into the tensors shows: on a GPU it is not looked for.
VALUES = (
    *("slots range", "slots twice", "slots", "parents self", "parents low", "parents", "prefix parents"),
    *("prefix ids", "pending path", "pending path order", "path range", "path order", "path"),
    *("start", "end", "order"),
)


def cases(table: list[tuple[str, Any, str]]) -> Any:
    """A parametrisation over a table: its name, what is changed or given, and the message."""
    return pytest.mark.parametrize(("name", "change", "message"), table, ids=[case[0] for case in table])


def refuse(backend: Backend, name: str) -> None:
    """Skips a case that the backend cannot see."""
    if name in VALUES and not backend.checks_values:
        pytest.skip("what is in the tensors is not looked at")


def verify_arguments() -> dict[str, Any]:
    return {
        "q": f32(B, N, HK, DK),
        "k": f32(B, N, HK, DK),
        "v": f32(B, N, HV, DV),
        "g": -f32(B, N, HV),
        "beta": f32(B, N, HV),
        "state": f32(B, HV, DV, DK),
        "strategy": "serial",
    }


@backends
@cases(VERIFY)
def test_verify(backend: Backend, name: str, change: dict[str, Any], message: str) -> None:
    refuse(backend, name)
    arguments = {**verify_arguments(), **change}
    written = "q" if arguments["state"].device.type == "meta" else "state"
    call(arguments, backend.verify, message, written)


@pytest.mark.parametrize("backend", UNCHECKED)
@pytest.mark.parametrize(
    ("strategy", "precision", "message"),
    [
        ("solve", "ieee", "got 'ieee' with tensor cores, want 'tf32x3', 'tf32', 'bf16' or 'auto'"),
        ("serial", "bf16", "got 'bf16' with strategy 'serial', want 'ieee' or 'auto'"),
        ("exact", "tf32", "got 'tf32' with strategy 'exact', want 'ieee' or 'auto'"),
        ("auto", "fp8", "got 'fp8', want 'ieee', 'tf32x3', 'tf32', 'bf16' or 'auto'"),
    ],
)
def test_precisions_of_a_gpu(backend: Backend, strategy: str, precision: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^precision: {message}$"):
        backend.verify(**{**verify_arguments(), "strategy": strategy, "precision": precision})


@backends
@pytest.mark.parametrize(("strategy", "most"), [("serial", 64), ("hybrid", 64), ("solve", 256)])
def test_node_limit(backend: Backend, strategy: str, most: int) -> None:
    n = most + 1
    with pytest.raises(ValueError, match=rf"q: got {n} new nodes and 0 prefix nodes, want at most {most}"):
        backend.verify(
            f32(1, n, 1, 32), f32(1, n, 1, 32), f32(1, n, 1, 32), state=f32(1, 1, 32, 32), strategy=strategy
        )


COMMIT: list[tuple[str, dict[str, Any], str]] = [
    (
        "k dim",
        {"factors": factors()._replace(k=f32(B, N, DK))},
        r"factors.k: got shape .* want \[B, N, HK, DK\]",
    ),
    ("u shape", {"factors": factors()._replace(u=f32(B, 2, HV, DV))}, r"factors.u: got shape"),
    (
        "u dtype",
        {"factors": factors()._replace(u=f32(B, N, HV, DV).half())},
        r"factors.u: got dtype Half, want Float",
    ),
    ("g shape", {"factors": factors()._replace(g=f32(B, N, 3))}, r"factors.g: got shape"),
    ("state shape", {"state": f32(B, HV, DV, 64)}, r"state: got shape .* want \[S, HV, DV, DK\]"),
    ("state overlap", {"state": f32(1, HV, DV, DK).expand(B, -1, -1, -1)}, r"state: the slot stride is 0"),
    ("path range", {"path": int32([[-1]] * B)}, r"path: row 0 entry 0 is -1, want a node in \[0, 3\)"),
    ("path order", {"path": int32([[0, 0]] * B)}, r"path: row 0 entry 1 is 0 after 0, want a path from root"),
    ("path rows", {"path": int32([[0]])}, r"path: got shape \[1, 1\], want \[B, P\] = \[2, any\]"),
    ("path dtype", {"path": torch.zeros(B, 1)}, r"path: got dtype Float, want Int"),
    ("lengths", {"path_lengths": int32([[1], [1]])}, r"path_lengths: got shape \[2, 1\], want \[B\]"),
    ("slots", {"slots": int32([7, 0])}, r"slots: row 0 is 7, want less than the 2 slots"),
    ("mode", {"mode": "quick"}, r"mode: got 'quick', want 'exact' or 'fast'"),
]


@backends
@cases(COMMIT)
def test_commit(backend: Backend, name: str, change: dict[str, Any], message: str) -> None:
    refuse(backend, name)
    call({"state": f32(B, HV, DV, DK), "factors": factors(), **change}, backend.commit, message, "state")


C, W = 8, 4
CONV: list[tuple[str, dict[str, Any], str]] = [
    ("x dim", {"x": f32(B, C)}, r"x: got shape \[2, 8\], want \[B, N, C\]"),
    ("x dtype", {"x": f32(B, N, C).double()}, r"x: got dtype Double"),
    ("x stride", {"x": f32(B, C, N).mT}, r"x: the last dimension has stride 3, want 1"),
    ("weight dtype", {"weight": f32(C, W).half()}, r"weight: got dtype Half, want Float"),
    ("weight shape", {"weight": f32(7, W)}, r"weight: got shape \[7, 4\], want \[C, W\] = \[8, any\]"),
    ("weight stride", {"weight": f32(W, C).mT}, r"weight: got a non-contiguous tensor"),
    ("weight width", {"weight": f32(C, 0)}, r"weight: got W = 0, want 1 to 16"),
    ("weight wide", {"weight": f32(C, 17)}, r"weight: got W = 17, want 1 to 16"),
    ("channels", {"x": f32(B, N, 0)}, r"x: got no channels, want C of at least 1"),
    ("bias", {"bias": f32(C, 1)}, r"bias: got shape \[8, 1\], want \[C\]"),
    ("state shape", {"conv_state": f32(B, W, C)}, r"conv_state: got shape \[2, 4, 8\], want \[S, W-1, C\]"),
    (
        "state dtype",
        {"conv_state": f32(B, W - 1, C).half()},
        r"conv_state: got dtype Half, want the dtype of x or",
    ),
    ("state stride", {"conv_state": f32(B, C, W - 1).mT}, r"conv_state: dimension 2 has stride 3, want 1"),
    ("slots", {"slots": int32([0, 0])}, r"slots: slot 0 is named by two rows"),
    ("parents", {"parents": int32([[0, 0, 0]] * B)}, r"parents: row 0 node 0 is 0, want -1: the first node"),
    ("lengths", {"lengths": int32([1])}, r"lengths: got shape \[1\]"),
    ("activation", {"activation": "relu"}, r"activation: got 'relu', want 'silu' or None"),
    ("both", {"pending": ConvPending(f32(B, N, C)), "prefix": ConvPrefix(f32(B, N, C))}, r"prefix: got both"),
    ("pending shape", {"pending": ConvPending(f32(B, N, 7))}, r"pending.x: got shape \[2, 3, 7\], want"),
    (
        "pending dtype",
        {"pending": ConvPending(f32(B, N, C).half())},
        r"pending.x: got dtype Half, want Float",
    ),
    (
        "pending path",
        {"pending": ConvPending(f32(B, N, C), int32([[3]] * B))},
        r"pending.path: row 0 entry 0 is 3",
    ),
    ("prefix shape", {"prefix": ConvPrefix(f32(1, N, C))}, r"prefix.x: got shape \[1, 3, 8\], want"),
    (
        "prefix parents",
        {"prefix": ConvPrefix(f32(B, 1, C), int32([[0]] * B))},
        r"prefix.parents: row 0 node 0 is",
    ),
    (
        "overlap",
        {"pending": ConvPending(f32(B, N, C)), "conv_state": f32(1, W - 1, C).expand(B, -1, -1)},
        r"conv_state: the slot stride is 0",
    ),
]


@backends
@cases(CONV)
def test_conv_verify(backend: Backend, name: str, change: dict[str, Any], message: str) -> None:
    refuse(backend, name)
    arguments = {"x": f32(B, N, C), "weight": f32(C, W), "bias": f32(C), "conv_state": f32(B, W - 1, C)}
    call({**arguments, **change}, backend.conv_verify, message, "conv_state")


CONV_COMMIT: list[tuple[str, dict[str, Any], str]] = [
    (
        "channels",
        {"x": f32(B, N, 7)},
        r"conv_state: got shape \[2, 3, 8\], want \[S, W-1, C\] = \[any, any, 7\]",
    ),
    ("dim", {"conv_state": f32(B, C)}, r"conv_state: got shape \[2, 8\]"),
    (
        "dtype",
        {"x": f32(B, N, C).half(), "conv_state": f32(B, 3, C).bfloat16()},
        r"conv_state: got dtype BFloat16",
    ),
    (
        "path",
        {"path": int32([[2, 1]] * B)},
        r"path: row 0 entry 1 is 1 after 2, want a path from root to leaf",
    ),
    ("slots", {"slots": int32([0, 5])}, r"slots: row 1 is 5, want less than the 2 slots of conv_state"),
]


@backends
@cases(CONV_COMMIT)
def test_conv_commit(backend: Backend, name: str, change: dict[str, Any], message: str) -> None:
    refuse(backend, name)
    call(
        {"conv_state": f32(B, 3, C), "x": f32(B, N, C), **change}, backend.conv_commit, message, "conv_state"
    )


PREFILL: list[tuple[str, dict[str, Any], str]] = [
    (
        "both",
        {"lengths": int32([1, 1]), "cu_seqlens": int32([0, N])},
        r"lengths: got both lengths and cu_seqlens",
    ),
    (
        "rows",
        {"cu_seqlens": int32([0, N])},
        r"q: got 2 rows with cu_seqlens, want packed sequences in one row",
    ),
    ("lengths", {"lengths": int32([1])}, r"lengths: got shape \[1\], want \[B\]"),
    ("slots", {"slots": int32([0, 0])}, r"slots: slot 0 is named by two rows"),
    ("state", {"state": f32(B, HV, DV, DK).half()}, r"state: got dtype Half, want float32 or bfloat16"),
    ("overlap", {"state": f32(1, HV, DV, DK).expand(B, -1, -1, -1)}, r"state: the slot stride is 0"),
]
PACKED: list[tuple[str, Tensor, str]] = [
    ("dtype", torch.tensor([0, N]), r"cu_seqlens: got dtype Long, want Int"),
    ("start", int32([1, N]), r"cu_seqlens: got 1 to 3, want 0 to the 3 tokens of q"),
    ("end", int32([0, N + 1]), r"cu_seqlens: got 0 to 4, want 0 to the 3 tokens of q"),
    ("order", int32([0, 2, 1, N]), r"cu_seqlens: entry 2 is 1 after 2, want ascending entries"),
    ("empty", int32([]), r"cu_seqlens: got no entries, want B \+ 1"),
]


@backends
@cases(PREFILL)
def test_prefill(backend: Backend, name: str, change: dict[str, Any], message: str) -> None:
    refuse(backend, name)
    arguments = verify_arguments()
    del arguments["strategy"]
    call({**arguments, **change}, backend.prefill, message, "state")


@backends
@cases(PACKED)
def test_prefill_packed(backend: Backend, name: str, change: Tensor, message: str) -> None:
    refuse(backend, name)
    arguments = verify_arguments()
    del arguments["strategy"]
    tokens = {name: arguments[name][:1] for name in ("q", "k", "v", "g", "beta")}
    state = f32(max(len(change) - 1, 0), HV, DV, DK)
    call({**tokens, "state": state, "cu_seqlens": change}, backend.prefill, message, "state")


@backends
def test_padding_is_not_inspected(backend: Backend) -> None:
    """Padding rows may hold anything: no check reads them."""
    wild = int32([[1 << 30] * N, [-1, 0, 1]])
    arguments = {**verify_arguments(), "slots": int32([-1, 0]), "parents": wild}
    out, fresh = backend.verify(**arguments)
    assert (out[0] == 0).all()
    backend.commit(arguments["state"], fresh, wild[:, :2].contiguous(), int32([2, 0]), slots=int32([-1, 0]))


# --- devices and types ---

OPS = (
    *("verify", "verify_deferred", "commit", "prefill", "conv_verify", "conv_verify_deferred", "conv_commit"),
    *("linear", "rms_norm_linear", "swiglu_linear", "rms_norm", "swiglu", "gated_delta_gates"),
    *("tree_attention", "rotate_heads"),
)


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
    call = operator(op)
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


NONE: list[tuple[str, dict[str, Any]]] = [
    *((name, {name: None}) for name in ("q", "k", "v", "state")),
    *((f"pending.factors.{n}", {"pending": Pending(factors()._replace(**{n: None}))}) for n in ("k", "u")),
    *((f"prefix.factors.{n}", {"prefix": Prefix(factors()._replace(**{n: None}))}) for n in ("k", "u")),
]
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("scale: got str, want a number or None", {"scale": "a"}),
    ("pending: got Factors, want Pending", {"pending": factors()}),
    ("pending.factors: got Tensor, want Factors", {"pending": Pending(f32(3))}),
    ("prefix: got tuple, want Prefix", {"prefix": (factors(), None)}),
    ("prefix.factors.k: got list, want a tensor", {"prefix": Prefix(Factors([1.0], f32(1)))}),
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
    with pytest.raises(ValueError, match=r"^prefix.x: got None, want a tensor$"):
        ops.conv_verify(x, **window, prefix=ConvPrefix(None))
    with pytest.raises(ValueError, match=r"^pending.x: got None, want a tensor$"):
        ops.conv_verify(x, **window, pending=ConvPending(None))
    with pytest.raises(TypeError, match=r"^weight: got Tensor, want PackedWeight$"):
        ops.linear(f32(2, 4), f32(6, 4))
    with pytest.raises(TypeError, match=r"^weight: got NoneType, want Tensor or Sequence$"):
        pack_weight(None)
    with pytest.raises(TypeError, match=r"^weight: got int, want Tensor$"):
        pack_weight([f32(2, 2), 3])


@pytest.mark.parametrize("value", [["serial"], {}, 1.5, b"serial", None])
def test_names_of_any_type_are_refused(value: object) -> None:
    """Also lists and dictionaries, which no table of names can look up."""
    for name in ("strategy", "precision"):
        with pytest.raises(ValueError, match=f"^{name}: got {re.escape(repr(value))}, want '"):
            ops.verify(**{**verify_arguments(), name: value})
    with pytest.raises(ValueError, match=f"^mode: got {re.escape(repr(value))}, want 'exact' or 'fast'$"):
        ops.commit(f32(B, HV, DV, DK), factors(), mode=value)
    if value is not None:
        with pytest.raises(ValueError, match=f"^activation: got {re.escape(repr(value))}, want 'silu' or "):
            ops.conv_verify(f32(B, N, C), f32(C, W), conv_state=f32(B, W - 1, C), activation=value)


def test_a_device_without_kernels_is_said_of_a_tensor() -> None:
    error = argument_error(NotImplementedError("no kernel"), ["x", "weight"], [f32(2), f32(2).to("meta")])
    assert isinstance(error, ValueError)
    assert str(error) == "weight: got a tensor on meta, want cpu"
