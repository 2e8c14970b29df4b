"""Random inputs of the operators: odd sizes, slices of wider buffers, permuted slots, poisoned padding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from specdec.ops import Factors

Gate = Literal["none", "head", "channel"]
Update = Literal["additive", "delta"]
RECURRENCES: list[tuple[Gate, Update]] = [
    (gate, update) for gate in ("none", "head", "channel") for update in ("additive", "delta")
]
EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.bfloat16, torch.float16)}
NAN = float("nan")


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass
class Case:
    """Arguments of one call of `verify`, and enough of its shape to compare results."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    state: Tensor
    slots: Tensor | None = None
    parents: Tensor | None = None
    lengths: Tensor | None = None
    qk_l2norm: bool = True
    scale: float | None = None

    @property
    def tokens(self) -> tuple[Tensor | None, ...]:
        return self.q, self.k, self.v, self.g, self.beta

    def kwargs(self, *names: str) -> dict[str, Any]:
        names = names or ("slots", "parents", "lengths", "qk_l2norm", "scale")
        return {name: getattr(self, name) for name in names}

    def pick(self, rows: Any, nodes: Any) -> tuple[Tensor | None, ...]:
        """The tokens of some rows and nodes."""
        return tuple(None if t is None else t[rows][:, nodes] for t in self.tokens)

    def changed(self, **fields: Any) -> Case:
        return replace(self, **fields)


def random_tokens(
    rng: torch.Generator,
    B: int,
    N: int,
    HK: int,
    HV: int,
    DK: int,
    DV: int,
    gate: Gate,
    update: Update,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """q, k, v are slices of one wider projection, as in a model; g and beta are slices too."""
    width = HK * DK
    wide = torch.randn(B, N, 2 * width + HV * DV + 5, generator=rng)
    wide[..., : 2 * width] *= DK**-0.5  # |q|, |k| about 1
    wide = wide.to(dtype)
    q = wide[..., :width].unflatten(-1, (HK, DK))
    k = wide[..., width : 2 * width].unflatten(-1, (HK, DK))
    v = wide[..., 2 * width : 2 * width + HV * DV].unflatten(-1, (HV, DV))
    g = None
    if gate != "none":
        shape = (B, N, HV + 3) if gate == "head" else (B, N, HV, DK + 3)
        g = -torch.rand(shape, generator=rng)[..., 2:-1].square() * 2
    beta = torch.rand(B, N, HV + 2, generator=rng)[..., 1:-1] if update == "delta" else None
    return q, k, v, g, beta


def path_to(parents: list[int], node: int) -> list[int]:
    """Nodes from the root to `node`."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def random_parents(rng: torch.Generator, B: int, N: int, first: int = 0) -> Tensor:
    """int32 [B, N] random forests: the parent is any earlier node, or (one in eight) the committed state."""
    ids = torch.arange(first, first + N)
    parents = (torch.rand(B, N, generator=rng) * ids).long()
    near = torch.rand(B, N, generator=rng) < 0.5  # half of the nodes continue a chain: deep trees too
    parents = torch.where(near, ids - 1, parents)
    root = (torch.rand(B, N, generator=rng) < 0.125) | (ids == 0)
    return torch.where(root, -1, parents).int()


def random_case(
    seed: int,
    *,
    B: int = 3,
    N: int = 9,
    HK: int = 2,
    HV: int = 4,
    DK: int = 32,
    DV: int = 64,
    gate: Gate = "head",
    update: Update = "delta",
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    tree: bool = True,
    ragged: bool = True,
    padding: bool = True,
    poison: bool = True,
) -> Case:
    """Row 0 is padding where `padding`, slots are permuted among more than B, the unread is NaN."""
    rng = torch.Generator().manual_seed(seed)
    q, k, v, g, beta = random_tokens(rng, B, N, HK, HV, DK, DV, gate, update, dtype)
    S = B + 2
    state = torch.randn(S, HV, DV, DK, generator=rng)
    slots = torch.randperm(S, generator=rng)[:B].int()
    if padding and B > 1:
        slots[0] = -1
    lengths = None
    if ragged:
        lengths = torch.randint(0, N + 1, (B,), generator=rng).int()
        if B > 2:
            lengths[1], lengths[2] = N, 0
    parents = random_parents(rng, B, N) if tree else None
    if poison:
        used = slots[slots >= 0].long()
        spare = torch.ones(S, dtype=torch.bool)
        spare[used] = False
        state[spare] = NAN
        for b in range(B):
            valid = 0 if slots[b] < 0 else N if lengths is None else int(lengths[b])
            for t in (q, k, v, g, beta):
                if t is not None:
                    t[b, valid:] = NAN
            if parents is not None:
                parents[b, valid:] = 1 << 30
    return Case(q, k, v, g, beta, state.to(state_dtype), slots, parents, lengths)


def random_factors(
    rng: torch.Generator, B: int, N: int, HK: int, HV: int, DK: int, DV: int, gate: Gate
) -> Factors:
    _, k, v, g, _ = random_tokens(rng, B, N, HK, HV, DK, DV, gate, "additive")
    return Factors(k.contiguous(), v.contiguous(), None if g is None else g.contiguous())


def random_path(rng: torch.Generator, B: int, N: int) -> tuple[Tensor, Tensor]:
    """path int32 [B, P] of ascending nodes with huge values beyond path_lengths int32 [B]."""
    lengths = torch.randint(0, N + 1, (B,), generator=rng).int()
    path = torch.full((B, N), 1 << 30, dtype=torch.int32)
    for b in range(B):
        m = int(lengths[b])
        path[b, :m] = torch.randperm(N, generator=rng)[:m].sort().values.int()
    return path, lengths


def tolerance(
    dtype: torch.dtype,
    steps: int,
    width: int,
    expected: Tensor,
    state: Tensor | None = None,
    factor_eps: float = 0.0,
) -> float:
    """Largest absolute error that float32 arithmetic may leave in `expected`, which has dtype `dtype`.

    A sum of `width` products in vector lanes adds at most width / 4 numbers one after the other (the
    narrowest vector has four lanes) and folds four lanes: width / 4 + 4 roundings of half an epsilon, of
    terms that together are no larger than norm times norm. A step does two such sums and a handful of single
    operations, and since no gate and no beta exceeds 1 an error is carried on, not enlarged: so `steps` times
    the roundings of a step, on numbers of the largest size around. Then one rounding to `dtype`.

    Where the factors of products are rounded first, to `factor_eps`, a sum of them errs by another half of it
    for either factor, and a step has four sums (with the state and with keys, for keys and for queries).
    """
    finite = expected[expected.isfinite()].double().abs()
    size = float(finite.max()) if finite.numel() else 0.0
    if state is not None:
        rows = state.double().nan_to_num(0.0).norm(dim=-1)
        size = max(size, float(rows.max()) if rows.numel() else 0.0)
    roundings = 2 * (width / 4 + 4) + 8
    a_step = 0.5 * EPS[torch.float32] * roundings + 4 * factor_eps
    return size * (a_step * (steps + 1) + (EPS[dtype] if dtype != torch.float32 else 0))


def bits(t: Tensor) -> Tensor:
    """The bits of a float32, bfloat16 or float16 tensor: NaN equals itself, 0 and -0 differ."""
    return t.view({2: torch.int16, 4: torch.int32}[t.element_size()])


def assert_same_bits(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Of tensors by name."""
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].shape == want[name].shape, name
        assert torch.equal(bits(got[name].contiguous()), bits(want[name].contiguous())), name


def assert_close(actual: Tensor, expected: Tensor, atol: float, what: str) -> None:
    """Element by element, NaN nowhere; prints the largest error and where it is."""
    assert actual.shape == expected.shape, (
        f"{what}: shape {tuple(actual.shape)}, want {tuple(expected.shape)}"
    )
    error = (actual.double() - expected.double()).abs()
    if error.numel() == 0:
        return
    worst = int(error.nan_to_num(torch.inf).argmax())
    place = torch.unravel_index(torch.tensor(worst), error.shape)
    value = float(error.flatten()[worst])
    assert value <= atol, f"{what}: error {value:.3g} at {[int(i) for i in place]}, want at most {atol:.3g}"
