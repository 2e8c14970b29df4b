"""What `tree_attention` refuses, and how torch sees it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.backends import COMPILED, Backend
from ops.cases import int32
from specdec import ops

backends = pytest.mark.parametrize("backend", COMPILED)
B, N, HQ, HK, D, NP, ROOM = 2, 3, 4, 2, 32, 2, 5
OPS = torch.ops.specdec


def f32(*shape: int) -> Tensor:
    return torch.ones(shape)


def arguments() -> dict[str, Any]:
    cache = {
        "k_cache": f32(B, HK, ROOM, D),
        "v_cache": f32(B, HK, ROOM, D),
        "cache_lengths": int32([ROOM, 0]),
    }
    return {"q": f32(B, N, HQ, D), "k": f32(B, N, HK, D), "v": f32(B, N, HK, D), **cache}


def prefix(**changed: Any) -> dict[str, Any]:
    return {"prefix_k": f32(B, NP, HK, D), "prefix_v": f32(B, NP, HK, D), **changed}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"q": f32(B, N, D)}, r"q: got shape \[2, 3, 32\], want \[B, N, HQ, D\]"),
    ({"q": f32(B, N, HQ, 24)}, r"q: got D = 24, want a multiple of 16 up to 256"),
    ({"q": f32(B, N, HQ, 272)}, r"q: got D = 272, want a multiple of 16 up to 256"),
    ({"q": f32(B, N, HQ, D).double()}, r"q: got dtype Double, want float32, bfloat16 or float16"),
    ({"q": f32(B, N, HQ, 2 * D)[..., ::2]}, r"q: the last dimension has stride 2, want 1"),
    ({"q": f32(B, N, 3, D)}, r"q: got 3 query heads, want a multiple of the 2 key heads"),
    ({"k": f32(B, N, D)}, r"k: got shape \[2, 3, 32\], want \[B, N, HK, D\] = \[2, 3, any, 32\]"),
    ({"k": f32(B, N, HK, D).half()}, r"k: got dtype Half, want Float"),
    ({"k": f32(B, N, HK, 2 * D)[..., ::2]}, r"k: the last dimension has stride 2, want 1"),
    ({"v": f32(B, N, 1, D)}, r"v: got shape \[2, 3, 1, 32\], want the shape of k = \[2, 3, 2, 32\]"),
    ({"v": f32(B, N, HK, D).bfloat16()}, r"v: got dtype BFloat16, want Float"),
    (
        {"k_cache": f32(B, 1, ROOM, D)},
        r"k_cache: got shape .*, want \[S, HK, Tmax, D\] = \[any, 2, any, 32\]",
    ),
    ({"k_cache": f32(B, HK, ROOM, D).half()}, r"k_cache: got dtype Half, want Float"),
    ({"k_cache": f32(B, HK, D, ROOM).mT}, r"k_cache: the last dimension has stride 5, want 1"),
    ({"v_cache": f32(B, HK, 4, D)}, r"v_cache: got shape .*, want the shape of k_cache = \[2, 2, 5, 32\]"),
    ({"cache_lengths": torch.tensor([1, 2])}, r"cache_lengths: got dtype Long, want Int"),
    ({"cache_lengths": int32([1])}, r"cache_lengths: got shape \[1\], want \[S\] = \[2\]"),
    (
        {"cache_lengths": int32([1, 6])},
        r"cache_lengths: slot 1 is 6, want 0 to the 5 tokens that k_cache has",
    ),
    ({"cache_lengths": int32([-1, 0])}, r"cache_lengths: slot 0 is -1, want 0 to the 5 tokens"),
    ({"cache_lengths": None}, r"cache_lengths: got None, want a tensor"),
    ({"slots": int32([0, 2])}, r"slots: row 1 is 2, want less than the 2 slots of k_cache"),
    ({"slots": int32([1, 1])}, r"slots: slot 1 is named by two rows"),
    ({"slots": int32([0])}, r"slots: got shape \[1\], want \[B\] = \[2\]"),
    ({"parents": int32([[-1, 0, 2]] * B)}, r"parents: row 0 node 2 "),
    ({"parents": int32([[-1, 0]] * B)}, r"parents: got shape \[2, 2\], want \[B, N\] = \[2, 3\]"),
    ({"lengths": torch.tensor([1, 2])}, r"lengths: got dtype Long, want Int"),
    (prefix(prefix_v=None), r"prefix_v: got None, want a tensor: keys and values of a prefix come together"),
    (prefix(prefix_k=None), r"prefix_k: got None, want a tensor: keys and values"),
    (
        prefix(prefix_k=f32(B, NP, HK, 48)),
        r"prefix_k: got shape .*, want \[B, NP, HK, D\] = \[2, any, 2, 32\]",
    ),
    (prefix(prefix_v=f32(B, 1, HK, D)), r"prefix_v: got shape .*, want the shape of prefix_k"),
    (prefix(prefix_v=f32(B, NP, HK, D).half()), r"prefix_v: got dtype Half, want Float"),
    (prefix(prefix_parents=int32([[-1, 1]] * B)), r"prefix_parents: row 0 node 1 "),
    ({"prefix_parents": int32([[-1, 0]] * B)}, r"prefix_k: got None with prefix_parents, want a tensor"),
    (
        {"q": f32(B, 257, HQ, D), "k": f32(B, 257, HK, D), "v": f32(B, 257, HK, D)},
        r"q: got 257 new nodes and 0 prefix nodes, want at most 256 in all",
    ),
]


@backends
@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message[:30] for _, message in WRONG])
def test_wrong_values(backend: Backend, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        backend.tree_attention(**{**arguments(), **change})
    assert "csrc" not in str(caught.value)
    assert "\n" not in str(caught.value)


@backends
def test_none_and_wrong_types(backend: Backend) -> None:
    for name in ("q", "k", "v", "k_cache", "v_cache"):
        with pytest.raises(ValueError, match=f"^{name}: got None, want a tensor$"):
            backend.tree_attention(**{**arguments(), name: None})
    for name, want in (("slots", "a tensor or None"), ("scale", "a number or None")):
        with pytest.raises(TypeError, match=f"^{name}: got str, want {want}$"):
            backend.tree_attention(**{**arguments(), name: "a"})


ROTATION: list[tuple[Tensor, Tensor, str]] = [
    (f32(N, HQ, D), f32(B, N, 2, D), r"x: got shape \[3, 4, 32\], want \[B, N, H, D\]"),
    (f32(B, N, HQ, 7), f32(B, N, 2, 7), "x: got D = 7, want an even number"),
    (f32(B, N, HQ, D).int(), f32(B, N, 2, D), "x: got dtype Int, want float32, bfloat16 or float16"),
    (f32(B, N, HQ, 2 * D)[..., ::2], f32(B, N, 2, D), "x: the last dimension has stride 2, want 1"),
    (f32(B, N, HQ, D), f32(1, N, 2, D), r"rotation: got shape .*, want \[B, N, 2, D\] = \[2, 3, 2, 32\]"),
    (f32(B, N, HQ, D), f32(B, N, 2, D).half(), "rotation: got dtype Half, want Float"),
    (f32(B, N, HQ, D), f32(B, N, D, 2).mT, "rotation: the last dimension has stride 2, want 1"),
    (
        f32(B, N, HQ, D),
        f32(B, N, 4, D)[:, :, ::2],
        "rotation: got stride 64 from cosines to sines, want D = 32",
    ),
]


@pytest.mark.parametrize(
    ("x", "rotation", "message"), ROTATION, ids=[message[:30] for *_, message in ROTATION]
)
def test_rotate_heads(x: Tensor, rotation: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        ops.rotate_heads(x, rotation)


@pytest.mark.parametrize("name", list(arguments())[:5])
def test_gradients_are_refused(name: str) -> None:
    given = arguments()
    given[name].requires_grad_()
    with pytest.raises(
        ValueError, match=re.escape(f"{name}: got a tensor that requires grad, want inference")
    ):
        ops.tree_attention(**given)
    with torch.no_grad():
        assert not ops.tree_attention(**given).requires_grad


def test_opcheck() -> None:
    rng = torch.Generator().manual_seed(1)
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v, k_cache, v_cache, prefix_k, prefix_v = (
            torch.randn(*shape, generator=rng).to(dtype)
            for shape in [(B, N, HQ, D), *[(B, N, HK, D)] * 2, *[(B, HK, ROOM, D)] * 2, *[(B, NP, HK, D)] * 2]
        )
        head = (q, k, v, k_cache, v_cache, int32([ROOM, 0]))
        torch.library.opcheck(OPS.tree_attention.default, (*head, *[None] * 7))
        tree = (int32([1, 0]), int32([[-1, 1, 2]] * B), int32([3, 1]))
        before = (prefix_k, prefix_v, int32([[-1, -1]] * B))
        torch.library.opcheck(OPS.tree_attention.default, (*head, *tree, *before, 0.5))


def test_opcheck_rotation() -> None:
    torch.library.opcheck(OPS.rotate_heads.default, (torch.randn(B, N, HQ, D), torch.randn(B, N, 2, D)))


def test_compiled_equals_eager() -> None:
    given = {name: torch.randn(t.shape) if t.is_floating_point() else t for name, t in arguments().items()}

    def twice(**how: Any) -> Tensor:
        return ops.tree_attention(**how) * 2

    out = torch.compile(twice, fullgraph=True, backend="aot_eager")(**given)
    assert torch.equal(out, twice(**given))


def test_meta_shapes() -> None:
    meta = {name: t.to("meta") for name, t in arguments().items()}
    out = ops.tree_attention(**meta)
    assert (out.shape, out.dtype) == ((B, N, HQ, D), torch.float32)
