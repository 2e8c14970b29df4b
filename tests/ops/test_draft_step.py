"""draft_step: the bits of the operators that it consists of, and prefixes that grow as `Steps` lets them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ops.blocks import on_meta, random_block, random_matrix
from ops.cases import bits, int32
from ops.layers import with_pools
from specdec import ops
from specdec.cache import LayerFactors, Round, Steps
from specdec.ops import BlockWeights, DraftStep, Factors, PackedWeight, Prefix, pack_weight

VOCAB = 53


def random_step(
    seed: int, *, own: bool = True, rows: int = VOCAB, N: int = 4, tree: bool = True, **block: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keyword arguments of a call, and those of its `BlockWeights`. Parents are nodes of the prefix, lengths
    0 to N with both among them; tokens and parents beyond them are out of range.
    """
    call, weights = random_block(seed, N=N, tree=tree, earlier="prefix", **block)
    x, NP = call.pop("x"), call["prefix_mixed"].shape[1]
    B, _, D = x.shape
    rng = torch.Generator().manual_seed(seed + 2000)
    call["slots"][0] = next(s for s in range(B + 2) if s not in call["slots"][1:].tolist())
    call["table"] = torch.randn(rows, D, generator=rng).to(x.dtype)
    call["outputs"] = torch.randn(B, NP, D, generator=rng).to(x.dtype)
    call["tokens"] = torch.randint(0, rows, (B, N), generator=rng)
    call["parents"] = torch.randint(0, NP, (B, N), generator=rng).int() if tree else None
    if call.get("lengths") is not None:
        call["lengths"].clamp_(max=N)
    for row in range(B):
        length = lengths_of(call)[row]
        call["tokens"][row, length:] = 1 << 40
        if tree:
            call["parents"][row, length:] = 1 << 30
    norm = torch.rand(D, generator=rng) + 0.5
    call["own"] = (norm, random_matrix(rng, D, D, block.get("stored", torch.float32))) if own else None
    call["norm"] = torch.rand(D, generator=rng) + 0.5
    call["head"] = random_matrix(rng, rows - 3, D, block.get("stored", torch.float32))
    return call, weights


def lengths_of(call: dict[str, Any]) -> list[int]:
    B, N = call["tokens"].shape
    return [N] * B if call.get("lengths") is None else call["lengths"].tolist()


def inputs(call: dict[str, Any]) -> Tensor:
    """[B, N, D] what enters the block; zero where there is no node."""
    outputs, table, (B, N) = call["outputs"], call["table"], call["tokens"].shape
    x = torch.zeros(B, N, table.shape[1], dtype=table.dtype)
    above = torch.zeros_like(x)
    for b, length in enumerate(lengths_of(call)):
        x[b, :length] = table[call["tokens"][b, :length]]
        parents = call["parents"]
        last = outputs.shape[1] - 1
        above[b, :length] = outputs[b, [last] * length if parents is None else parents[b, :length].long()]
    if call["own"] is None:
        return x
    norm, weight = call["own"]
    return ops.rms_norm_linear(above, norm, call["weights"].eps, weight, residual=x)


def composed(call: dict[str, Any]) -> DraftStep:
    rows = ("conv_state", "state", "slots", "parents", "lengths", "prefix", "prefix_mixed", "scale")
    where = {name: call[name] for name in rows if name in call}
    strategy = call.get("strategy", "exact")
    block = ops.verify_block(inputs(call), call["weights"], **where, strategy=strategy)
    valid = [block.x[b, :length] for b, length in enumerate(lengths_of(call))]
    eps = call["weights"].eps
    logits = ops.rms_norm_linear(torch.cat(valid).float(), call["norm"], eps, call["head"])
    old = call["prefix"].factors
    factors = Factors(*(torch.cat(pair, dim=1) for pair in zip(old, block.factors, strict=True)))
    return DraftStep(
        logits,
        torch.cat([call["outputs"], block.x], dim=1),
        torch.cat([call["prefix_mixed"], block.mixed], dim=1),
        factors,
    )


def tensors(step: DraftStep) -> dict[str, Tensor]:
    logits, outputs, mixed, (k, u, g) = step
    assert g is not None
    return {"logits": logits, "outputs": outputs, "mixed": mixed, "k": k, "u": u, "g": g}


def expect_composition(call: dict[str, Any]) -> DraftStep:
    used = with_pools(call)
    step = ops.draft_step(**used)
    got, want = tensors(step), tensors(composed(call))
    for name, tensor in want.items():
        assert got[name].shape == tensor.shape, name
        assert got[name].dtype == tensor.dtype, name
        assert got[name].is_contiguous(), name
        assert torch.equal(bits(got[name]), bits(tensor)), name
    for name in ("state", "conv_state"):
        assert torch.equal(bits(used[name]), bits(call[name])), name
    assert step.logits.dtype == torch.float32
    return step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("own", [True, False], ids=["own", "tokens alone"])
def test_bits_of_the_composition(own: bool, dtype: torch.dtype) -> None:
    for seed in range(6):
        call, _ = random_step(
            seed,
            own=own,
            dtype=dtype,
            stored=(torch.float32, torch.bfloat16, torch.int8)[seed // 2],
            gated=seed % 3 != 0,
            mlp=seed != 4,
            D=31 + seed,
            HK=(1, 2)[seed % 2],
            W=(4, 1, 2)[seed % 3],
            NP=1 + 2 * seed,
            N=1 + seed,
        )
        expect_composition({**call, "strategy": ("serial", "hybrid", "exact")[seed % 3]})


@pytest.mark.parametrize("B", [1, 5])
@pytest.mark.parametrize("own", [True, False])
def test_chains(own: bool, B: int) -> None:
    """A node a row below the last of the prefix, without and with rows that have none."""
    call, _ = random_step(20, own=own, B=B, N=1, tree=False, ragged=False)
    step = expect_composition(call)
    named = expect_composition({**call, "parents": torch.full((B, 1), 4, dtype=torch.int32)})
    for name, tensor in tensors(named).items():
        assert torch.equal(bits(tensor), bits(tensors(step)[name])), name
    if B > 1:
        some = expect_composition({**call, "lengths": int32([1, 0, 1, 0, 0])})
        assert torch.equal(some.logits, step.logits[[0, 2]])


def test_rows_without_nodes() -> None:
    call, _ = random_step(21, B=3, ragged=False)
    none = expect_composition({**call, "lengths": int32([0, 0, 0])})
    assert none.logits.shape == (0, VOCAB - 3)
    assert not none.outputs[:, 5:].any()
    every = expect_composition(call)
    some = expect_composition({**call, "lengths": int32([0, 4, 2])})
    rows = every.logits.unflatten(0, (3, 4))
    assert torch.equal(some.logits, torch.cat([rows[1], rows[2, :2]]))


def test_every_slot_in_order() -> None:
    call, _ = random_step(22, B=3, ragged=False)
    pools = {name: call[name][:3] for name in ("state", "conv_state")}
    expect_composition({**call, **pools, "slots": None})


def test_inputs_of_other_strides() -> None:
    """Raw projections of a prefix are views, as an operator's and as a model's own are."""
    call, _ = random_step(23)
    want = tensors(ops.draft_step(**call))
    mixed = call["prefix_mixed"].transpose(0, 1).contiguous().transpose(0, 1)
    for name, tensor in tensors(ops.draft_step(**{**call, "prefix_mixed": mixed})).items():
        assert torch.equal(bits(tensor), bits(want[name])), name


@pytest.mark.parametrize("old_parents", [True, False])
@pytest.mark.parametrize("new_parents", [True, False])
def test_the_prefix_is_what_steps_make_of_it(old_parents: bool, new_parents: bool) -> None:
    """`Steps.replace` by what a step gives back leaves what `Steps.extend` by a block's round does."""
    call, _ = random_step(24, N=3 if new_parents else 1, tree=new_parents)
    parents = int32([[-1, 0, 0, 2, 1]] * 4) if old_parents else None
    call["prefix"] = call["prefix"]._replace(parents=parents)
    old = Round((LayerFactors(call["prefix"].factors, call["prefix_mixed"]),), call["slots"], parents, 5)
    rows = ("conv_state", "state", "slots", "parents", "lengths", "prefix", "prefix_mixed", "scale")
    block = ops.verify_block(inputs(call), call["weights"], **{name: call[name] for name in rows})
    extended, replaced = Steps(), Steps()
    for steps in (extended, replaced):
        steps.extend(old)
    N = call["tokens"].shape[1]
    extended.extend(Round((LayerFactors(block.factors, block.mixed),), call["slots"], call["parents"], N))
    step = ops.draft_step(**call)
    replaced.replace((LayerFactors(step.factors, step.mixed),), call["parents"], N)
    want, got = extended.round, replaced.round
    assert want is not None
    assert got is not None
    assert len(extended) == len(replaced) == 5 + N
    assert (want.parents is None) == (got.parents is None) == (not old_parents and not new_parents)
    if want.parents is not None:
        assert torch.equal(got.parents, want.parents)
    (a,), (b,) = want.layers, got.layers
    assert isinstance(a, LayerFactors)
    assert isinstance(b, LayerFactors)
    for one, other in zip((*a.recurrent, a.conv), (*b.recurrent, b.conv), strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(bits(one.contiguous()), bits(other.contiguous()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_levels_are_one_verification(dtype: torch.dtype) -> None:
    """A tree that is drafted level by level, each on the outputs of the one before, and the block over all of
    it at once from the committed state: the same bits of every node.
    """
    call, _ = random_step(25, B=3, N=2, NP=1, dtype=dtype, ragged=False)
    rng = torch.Generator().manual_seed(9)
    where = {name: call[name] for name in ("conv_state", "state", "slots", "scale")}
    entered = [torch.randn(3, 1, 37, generator=rng).to(dtype)]
    first = ops.verify_block(entered[0], call["weights"], **where)
    parents = torch.full((3, 1), -1, dtype=torch.int32)
    call.update(outputs=first.x, prefix=Prefix(first.factors, parents), prefix_mixed=first.mixed)
    logits = []
    for N in (2, 3, 1, 4):
        NP = call["outputs"].shape[1]
        call["tokens"] = torch.randint(0, VOCAB, (3, N), generator=rng)
        call["parents"] = torch.randint(0, NP, (3, N), generator=rng).int()
        entered.append(inputs(call))
        step = expect_composition(call)
        logits.append(step.logits.unflatten(0, (3, N)))
        parents = torch.cat([parents, call["parents"]], dim=1)
        call.update(outputs=step.outputs, prefix=Prefix(step.factors, parents), prefix_mixed=step.mixed)
    whole = ops.verify_block(torch.cat(entered, dim=1), call["weights"], parents=parents, **where)
    assert torch.equal(whole.x, call["outputs"])
    assert torch.equal(whole.mixed, call["prefix_mixed"])
    for got, want in zip(call["prefix"].factors, whole.factors, strict=True):
        assert torch.equal(got, want)
    eps = call["weights"].eps
    want_logits = ops.rms_norm_linear(whole.x[:, 1:].float(), call["norm"], eps, call["head"])
    assert torch.equal(torch.cat(logits, dim=1), want_logits)


def test_rows_do_not_see_each_other() -> None:
    call, _ = random_step(26, B=6, ragged=False)
    together = ops.draft_step(**call)
    rows = together.logits.unflatten(0, (6, 4))
    for b in range(6):
        one = {name: call[name][b : b + 1] for name in ("tokens", "parents", "outputs", "slots")}
        factors, parents = call["prefix"]
        one["prefix"] = Prefix(Factors(*(t[b : b + 1] for t in factors)), parents[b : b + 1])
        alone = ops.draft_step(
            **{**call, **one, "lengths": None, "prefix_mixed": call["prefix_mixed"][b : b + 1]}
        )
        assert torch.equal(alone.logits, rows[b])
        assert torch.equal(alone.outputs[0], together.outputs[b])


# --- as torch sees it ---


def operands(call: dict[str, Any]) -> tuple[Any, ...]:
    """As the operator takes them."""
    own = call["own"] or (None, None)
    factors, parents = call["prefix"]
    return (
        call["tokens"], call.get("parents"), call.get("lengths"), call["outputs"], call["table"], own[0],
        None if own[1] is None else own[1].data, *call["weights"].operands, call["conv_state"], call["state"],
        call["slots"], *factors, parents, call["prefix_mixed"].contiguous(), call["norm"], call["head"].data,
        call["head"].out_features, None, 0,
    )  # fmt: skip


@pytest.mark.parametrize("own", [True, False])
def test_opcheck(own: bool) -> None:
    call, _ = random_step(2, own=own, B=2, N=3, HK=1, HV=2, ragged=False)
    check, op = torch.library.opcheck, torch.ops.specdec.draft_step.default
    check(op, operands(call))
    call["tokens"][0, 2:], call["parents"][0, 2:] = -1, -1
    # How many rows of logits there are is in the data: dynamic shapes cannot be traced ahead of time.
    some = operands({**call, "lengths": int32([2, 3])})
    check(op, some, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))


def test_compile() -> None:
    def levels(**call: Any) -> Tensor:
        step = ops.draft_step(**call)
        best = step.logits.argmax(-1)[:, None]
        prefix = Prefix(step.factors, None)
        more = {"tokens": best, "outputs": step.outputs, "prefix": prefix, "prefix_mixed": step.mixed}
        return ops.draft_step(**{**call, **more}).logits

    call, _ = random_step(2, B=2, N=1, HK=1, HV=2, ragged=False, tree=False)
    want = levels(**call)
    assert torch.equal(torch.compile(levels, fullgraph=True, backend="aot_eager")(**call), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_meta_shapes(dtype: torch.dtype) -> None:
    call, weights = random_step(2, B=2, N=3, HK=1, HV=2, ragged=False, dtype=dtype)
    want = tensors(ops.draft_step(**call))
    meta = on_meta({name: value for name, value in call.items() if name != "weights"})
    got = tensors(ops.draft_step(**meta, weights=BlockWeights(**on_meta(weights))))
    for name, tensor in want.items():
        assert (got[name].shape, got[name].dtype) == (tensor.shape, tensor.dtype), name


# --- errors ---


def f32(*shape: int) -> Tensor:
    return torch.ones(shape)


def plain_call(**changes: Any) -> dict[str, Any]:
    call, _ = random_step(2, B=2, N=3, HK=1, HV=2, ragged=False)
    return {**call, **changes}


def tokens(*values: int) -> Tensor:
    return torch.tensor([[0, 1, 2], values])


def own_with(norm: Tensor, weight: PackedWeight) -> dict[str, Any]:
    return {"own": (norm, weight)}


SQUARE = pack_weight(torch.eye(37))
FACTORS = Factors(f32(2, 4, 1, 64), f32(2, 4, 2, 64), f32(2, 4, 2))
ERRORS: list[tuple[str, dict[str, Any], str]] = [
    ("levels", {"parents": None}, r"parents: got None for 3 nodes a row, want int32 \[B, N\]: a step is one"),
    ("token", {"tokens": tokens(0, VOCAB, 0)}, rf"tokens: got {VOCAB}, want 0 to {VOCAB - 1}"),
    ("negative token", {"tokens": tokens(0, -1, 0)}, rf"tokens: got -1, want 0 to {VOCAB - 1}"),
    ("tokens dtype", {"tokens": tokens(0, 0, 0).int()}, r"tokens: got dtype Int, want Long"),
    ("tokens shape", {"tokens": torch.tensor([0, 1])}, r"tokens: got shape \[2\], want \[B, N\]"),
    ("tokens stride", {"tokens": torch.zeros(2, 6).long()[:, ::2]}, r"tokens: got a non-contiguous tensor"),
    (
        "parent",
        {"parents": int32([[0, 0, 0], [0, 0, 5]])},
        r"parents: got 5 for node 2, want 0 to 4, a node of the prefix",
    ),
    ("root", {"parents": int32([[0, -1, 0]] * 2)}, r"parents: got -1 for node 1, want 0 to 4"),
    ("parents dtype", {"parents": torch.zeros(2, 3).long()}, r"parents: got dtype Long, want Int"),
    (
        "parents shape",
        {"parents": int32([[0, 0]] * 2)},
        r"parents: got shape \[2, 2\], want \[B, N\] = \[2, 3",
    ),
    ("lengths", {"lengths": int32([3, 4])}, r"lengths: got 4, want 0 to 3"),
    ("negative length", {"lengths": int32([-1, 3])}, r"lengths: got -1, want 0 to 3"),
    ("lengths dtype", {"lengths": torch.tensor([3, 3])}, r"lengths: got dtype Long, want Int"),
    ("no prefix", {"outputs": f32(2, 0, 37)}, r"outputs: got no nodes, want those of the prefix"),
    (
        "outputs rows",
        {"outputs": f32(1, 5, 37)},
        r"outputs: got shape \[1, 5, 37\], want \[B, NP, D\] = \[2,",
    ),
    ("outputs width", {"outputs": f32(2, 5, 36)}, r"outputs: got shape .* = \[2, 5, 37\]"),
    ("outputs dtype", {"outputs": f32(2, 5, 37).half()}, r"outputs: got dtype Half, want Float"),
    ("outputs stride", {"outputs": f32(2, 5, 74)[..., ::2]}, r"outputs: got a non-contiguous tensor"),
    # Node 4 of the outputs would be a new one to the factors.
    ("fewer factors", {"prefix": Prefix(FACTORS, int32([[-1, 0, 0, 0]] * 2))}, r"prefix\.factors\.k: got"),
    (
        "no gate",
        {"prefix": Prefix(Factors(f32(2, 5, 1, 64), f32(2, 5, 2, 64)))},
        r"prefix: got None, want the",
    ),
    ("no mixed", {"prefix_mixed": None}, r"prefix: got None, want the nodes that a step continues"),
    ("mixed dtype", {"prefix_mixed": f32(2, 5, 256).half()}, r"prefix_mixed: got dtype Half, want Float"),
    ("table shape", {"table": f32(37)}, r"table: got shape \[37\], want \[V, D\]"),
    ("table stride", {"table": f32(53, 74)[:, ::2]}, r"table: got a non-contiguous tensor"),
    ("own norm", own_with(f32(1), SQUARE), r"own\[0\]: got shape \[1\], want \[D\] = \[37\]"),
    (
        "own weight",
        own_with(f32(37), pack_weight(f32(37, 74))),
        r"own\[1\]: got \[37, 74\], want \[out, in\] = \[D, D\]",
    ),
    (
        "own bias",
        own_with(f32(37), pack_weight(torch.eye(37), bias=f32(37))),
        r"own\[1\]: got a weight with a",
    ),
    ("norm", {"norm": f32(1)}, r"norm: got shape \[1\], want \[D\] = \[37\]"),
    (
        "head bias",
        {"head": pack_weight(f32(9, 37), bias=f32(9))},
        r"head: got a weight with a bias, want one",
    ),
    (
        "head",
        {"head": pack_weight(f32(9, 36))},
        r"norm_weight: got shape \[37\], want .* divisor of the weight's 36",
    ),
    ("slots", {"slots": int32([1, 1])}, r"slots: slot 1 is named by two rows"),
    ("strategy", {"strategy": "solve"}, r"strategy: got 'solve', want 'serial' or 'hybrid' or 'exact'"),
    ("grad", {"table": f32(53, 37).requires_grad_()}, r"table: got a tensor that requires grad"),
]


@pytest.mark.parametrize(("changes", "message"), [pytest.param(*case[1:], id=case[0]) for case in ERRORS])
def test_errors(changes: dict[str, Any], message: str) -> None:
    call = plain_call(**changes)
    before = with_pools(call)
    with pytest.raises(ValueError, match=f"^{message}"):
        ops.draft_step(**call)
    for name in ("state", "conv_state"):
        assert torch.equal(bits(call[name]), bits(before[name]))


def test_types() -> None:
    for name, want in (("weights", "BlockWeights"), ("head", "PackedWeight"), ("prefix", "Prefix")):
        with pytest.raises(TypeError, match=f"^{name}: got NoneType, want {want}"):
            ops.draft_step(**plain_call(**{name: None}))
    with pytest.raises(TypeError, match=r"^own\[1\]: got Tensor, want PackedWeight"):
        ops.draft_step(**plain_call(own=(f32(37), f32(37, 37))))
    with pytest.raises(TypeError, match=r"^tokens: got list, want a tensor"):
        ops.draft_step(**plain_call(tokens=[[1]]))
