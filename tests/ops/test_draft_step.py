"""draft_step: the bits of the operators that it consists of, and prefixes that grow as `Steps` lets them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ops.blocks import on_meta
from ops.cases import bits, int32
from ops.drafting import (
    VOCAB,
    Made,
    arguments,
    composed,
    drafting_of,
    inputs,
    random_drafting,
    readout,
    rows_of,
    tensors,
)
from ops.stacks import MIXER, MLP, SMALL, WHOLE
from specdec import ops
from specdec.cache import LayerFactors, Round, Steps
from specdec.ops import (
    BlockEntries,
    BlockStack,
    BlockWeights,
    DraftAdapter,
    Drafting,
    DraftPlace,
    DraftStep,
    Factors,
    PackedWeight,
    StackPrefix,
    pack_weight,
)
from specdec.ops.drafting import _operands

POOLS = ("states", "conv_states")


def expect_composition(made: Made, **changes: Any) -> DraftStep:
    call, *rest = made
    call = {**call, **changes}
    before = {name: [pool.clone() for pool in call[name]] for name in POOLS}
    step = ops.draft_step(**arguments(call))
    got, want = tensors(step), tensors(composed((call, *rest)))
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].shape == tensor.shape, name
        assert got[name].dtype == tensor.dtype, name
        assert got[name].is_contiguous(), name
        assert torch.equal(bits(got[name]), bits(tensor)), name
    expect_pools(call, before)
    assert step.logits.dtype == torch.float32
    return step


def expect_pools(call: dict[str, Any], before: dict[str, list[Tensor]]) -> None:
    for name in POOLS:
        for now, then in zip(call[name], before[name], strict=True):
            assert torch.equal(bits(now), bits(then)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("own", [True, False], ids=["own", "tokens alone"])
def test_bits_of_the_composition(own: bool, dtype: torch.dtype) -> None:
    for seed in range(6):
        made = random_drafting(
            seed,
            [(WHOLE,), (WHOLE, MLP, MIXER), (MLP, WHOLE), (WHOLE,), (MIXER,), (MLP,)][seed],
            own=own,
            adapter=seed in (0, 1, 5),
            dtype=dtype,
            stored=[(torch.float32, torch.bfloat16, torch.int8)[seed // 2], torch.float32][: 1 + seed % 2],
            gated=seed % 3 != 0,
            D=31 + seed,
            HK=(1, 2)[seed % 2],
            W=(4, 1, 2)[seed % 3],
            NP=1 + 2 * seed,
            N=1 + seed,
        )
        expect_composition(made, strategy=("serial", "hybrid", "exact")[seed % 3])


@pytest.mark.parametrize("B", [1, 5])
@pytest.mark.parametrize("own", [True, False])
def test_chains(own: bool, B: int) -> None:
    """A node a row below the last of the prefix, without and with rows that have none."""
    made = random_drafting(20, (WHOLE, MIXER), own=own, B=B, N=1, tree=False, ragged=False)
    step = expect_composition(made)
    named = expect_composition(made, parents=torch.full((B, 1), 4, dtype=torch.int32))
    for name, tensor in tensors(named).items():
        assert torch.equal(bits(tensor), bits(tensors(step)[name])), name
    if B > 1:
        some = expect_composition(made, lengths=int32([1, 0, 1, 0, 0]))
        assert torch.equal(some.logits, step.logits[[0, 2]])


def test_rows_without_nodes() -> None:
    made = random_drafting(21, B=3, ragged=False, adapter=True)
    none = expect_composition(made, lengths=int32([0, 0, 0]))
    assert none.logits.shape == (0, VOCAB - 3)
    assert not none.outputs[:, 5:].any()
    every = expect_composition(made)
    some = expect_composition(made, lengths=int32([0, 4, 2]))
    rows = every.logits.unflatten(0, (3, 4))
    assert torch.equal(some.logits, torch.cat([rows[1], rows[2, :2]]))


def test_every_slot_in_order() -> None:
    made = random_drafting(22, B=3, ragged=False)
    pools = {name: [pool[:3] for pool in made[0][name]] for name in POOLS}
    expect_composition(made, **pools, slots=None)


def test_inputs_of_other_strides() -> None:
    """Raw projections of a prefix are views, as an operator's and as a model's own are."""
    call, *_ = random_drafting(23, (WHOLE, WHOLE))
    want = tensors(ops.draft_step(**arguments(call)))
    entries = [
        BlockEntries(factors, mixed.transpose(0, 1).contiguous().transpose(0, 1))
        for factors, mixed in call["prefix"].entries
    ]
    call["prefix"] = call["prefix"]._replace(entries=entries)
    for name, tensor in tensors(ops.draft_step(**arguments(call))).items():
        assert torch.equal(bits(tensor), bits(want[name])), name


@pytest.mark.parametrize("old_parents", [True, False])
@pytest.mark.parametrize("new_parents", [True, False])
def test_the_prefix_is_what_steps_make_of_it(old_parents: bool, new_parents: bool) -> None:
    """`Steps.replace` by what a step gives back leaves what `Steps.extend` by a block's round does."""
    call, *_ = random_drafting(24, N=3 if new_parents else 1, tree=new_parents)
    parents = int32([[-1, 0, 0, 2, 1]] * 4) if old_parents else None
    call["prefix"] = call["prefix"]._replace(parents=parents)
    old = Round((LayerFactors(*call["prefix"].entries[0]),), call["slots"], parents, 5)
    rows = ("conv_states", "states", "slots", "parents", "lengths", "prefix", "scale")
    block = ops.verify_stack(inputs(call), call["weights"], **{name: call[name] for name in rows})
    extended, replaced = Steps(), Steps()
    for steps in (extended, replaced):
        steps.extend(old)
    N = call["tokens"].shape[1]
    extended.extend(Round((LayerFactors(*block.entries[0]),), call["slots"], call["parents"], N))
    step = ops.draft_step(**arguments(call))
    replaced.replace((LayerFactors(*step.entries[0]),), call["parents"], N)
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
@pytest.mark.parametrize("parts", [(WHOLE,), (WHOLE, MLP, MIXER)], ids=str)
def test_levels_are_one_verification(parts: tuple[str, ...], dtype: torch.dtype) -> None:
    """A tree that is drafted level by level, each on the outputs of the one before, and the blocks over all
    of it at once from the committed state: the same bits of every node.
    """
    made = random_drafting(25, parts, B=3, N=2, NP=1, dtype=dtype, ragged=False, adapter=len(parts) > 1)
    call = made[0]
    rng = torch.Generator().manual_seed(9)
    where = {name: call[name] for name in ("conv_states", "states", "slots", "scale")}
    entered = [torch.randn(3, 1, 37, generator=rng).to(dtype)]
    first = ops.verify_stack(entered[0], call["weights"], **where)
    parents = torch.full((3, 1), -1, dtype=torch.int32)
    call.update(outputs=first.hidden[-1], prefix=StackPrefix(first.entries, parents))
    logits = []
    for N in (2, 3, 1, 4):
        NP = call["outputs"].shape[1]
        call["tokens"] = torch.randint(0, VOCAB, (3, N), generator=rng)
        call["parents"] = torch.randint(0, NP, (3, N), generator=rng).int()
        entered.append(inputs(call))
        step = expect_composition(made)
        logits.append(step.logits.unflatten(0, (3, N)))
        parents = torch.cat([parents, call["parents"]], dim=1)
        call.update(outputs=step.outputs, prefix=StackPrefix(step.entries, parents))
    whole = ops.verify_stack(torch.cat(entered, dim=1), call["weights"], parents=parents, **where)
    assert torch.equal(whole.hidden[-1], call["outputs"])
    for got, want in zip(call["prefix"].entries, whole.entries, strict=True):
        assert torch.equal(got.mixed, want.mixed)
        for one, other in zip(got.factors, want.factors, strict=True):
            assert one is not None
            assert other is not None
            assert torch.equal(one, other)
    assert torch.equal(torch.cat(logits, dim=1), readout(call, whole.hidden[-1][:, 1:]))


def test_rows_do_not_see_each_other() -> None:
    call, *_ = random_drafting(26, (WHOLE, WHOLE), B=6, ragged=False)
    together = ops.draft_step(**arguments(call))
    rows = together.logits.unflatten(0, (6, 4))
    for b in range(6):
        alone = ops.draft_step(**arguments(rows_of(call, slice(b, b + 1))))
        assert torch.equal(alone.logits, rows[b])
        assert torch.equal(alone.outputs[0], together.outputs[b])


# --- as torch sees it ---


def operands(call: dict[str, Any]) -> tuple[Any, ...]:
    """As the operator takes them."""
    entries = [BlockEntries(factors, mixed.contiguous()) for factors, mixed in call["prefix"].entries]
    placed = drafting_of({**call, "prefix": call["prefix"]._replace(entries=entries)})
    return (call["tokens"], call.get("parents"), call.get("lengths"), *_operands(**placed), 0)


@pytest.mark.parametrize(("own", "parts"), [(True, (WHOLE,)), (False, (MLP, WHOLE, MIXER))], ids=str)
def test_opcheck(own: bool, parts: tuple[str, ...]) -> None:
    call, *_ = random_drafting(2, parts, own=own, adapter=not own, B=2, N=3, HK=1, HV=2, ragged=False)
    check, op = torch.library.opcheck, torch.ops.specdec.draft_step.default
    check(op, operands(call))
    call["tokens"][0, 2:], call["parents"][0, 2:] = -1, -1
    # How many rows of logits there are is in the data: dynamic shapes cannot be traced ahead of time.
    some = operands({**call, "lengths": int32([2, 3])})
    check(op, some, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))


def test_compile() -> None:
    def levels(tokens: Tensor, drafting: Drafting, place: DraftPlace, **rest: Any) -> Tensor:
        step = ops.draft_step(tokens, drafting, place, **rest)
        best = step.logits.argmax(-1)[:, None]
        below = place._replace(outputs=step.outputs, prefix=StackPrefix(step.entries))
        return ops.draft_step(best, drafting, below, **rest).logits

    call, *_ = random_drafting(
        2, (WHOLE, MIXER), adapter=True, B=2, N=1, HK=1, HV=2, ragged=False, tree=False
    )
    want = levels(**arguments(call))
    assert torch.equal(torch.compile(levels, fullgraph=True, backend="aot_eager")(**arguments(call)), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_meta_shapes(dtype: torch.dtype) -> None:
    call, _, weights = random_drafting(
        2, (WHOLE, WHOLE), B=2, N=3, HK=1, HV=2, ragged=False, dtype=dtype, adapter=True
    )
    want = tensors(ops.draft_step(**arguments(call)))
    lists = ("states", "conv_states")
    meta = on_meta({n: value for n, value in call.items() if n not in ("weights", "prefix", *lists)})
    meta.update({name: [pool.to("meta") for pool in call[name]] for name in lists})
    meta["prefix"] = StackPrefix(
        [on_meta(entry) for entry in call["prefix"].entries], on_meta(call["prefix"].parents)
    )
    meta["weights"] = BlockStack([BlockWeights(**on_meta(given)) for given in weights])
    got = tensors(ops.draft_step(**arguments(meta)))
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert (got[name].shape, got[name].dtype) == (tensor.shape, tensor.dtype), name


# --- errors ---


def f32(*shape: int) -> Tensor:
    return torch.ones(shape)


def plain_call(**changes: Any) -> dict[str, Any]:
    call, *_ = random_drafting(2, B=2, N=3, HK=1, HV=2, ragged=False)
    return {**call, **changes}


def tokens(*values: int) -> Tensor:
    return torch.tensor([[0, 1, 2], values])


def own_with(norm: Tensor, weight: PackedWeight) -> dict[str, Any]:
    return {"own": (norm, weight)}


SQUARE = pack_weight(torch.eye(37))


def adapter_with(**parts: Any) -> dict[str, Any]:
    whole = DraftAdapter(f32(37), pack_weight(f32(22, 37)), pack_weight(f32(37, 11)), 1e-5)
    return {"adapter": whole._replace(**parts)}


def prefix_with(factors: Factors, mixed: Tensor) -> dict[str, Any]:
    return {"prefix": StackPrefix([BlockEntries(factors, mixed)])}


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
    ("fewer factors", prefix_with(FACTORS, f32(2, 4, 256)), r"prefix\.factors\.k: got shape \[2, 4, 1, 64\]"),
    (
        "no gate",
        prefix_with(Factors(f32(2, 5, 1, 64), f32(2, 5, 2, 64)), f32(2, 5, 256)),
        r"entries\[0\].factors.g: got None, want a tensor",
    ),
    ("no entries", {"prefix": StackPrefix([])}, r"prefix: got 0 tensors, want 4, k, u, g and the raw"),
    (
        "mixed dtype",
        prefix_with(Factors(f32(2, 5, 1, 64), f32(2, 5, 2, 64), f32(2, 5, 2)), f32(2, 5, 256).half()),
        r"prefix_mixed: got dtype Half, want Float",
    ),
    ("windows", {"conv_states": []}, r"conv_states: got 0 tensors, want 1, one a mixer"),
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
    (
        "adapter's norm",
        adapter_with(norm=f32(36)),
        r"adapter \(norm\): got shape \[36\], want \[D\] = \[37\]",
    ),
    (
        "adapter's bias",
        adapter_with(down=pack_weight(f32(37, 11), bias=f32(37))),
        r"adapter\.down: got a weight with a bias, want one without",
    ),
    (
        "adapter's inputs",
        adapter_with(gate_up=pack_weight(f32(22, 36))),
        r"adapter\.down: got \[37, 11\], want \[out, in\] = \[36, 11\]",
    ),
    (
        "adapter's width",
        adapter_with(gate_up=pack_weight(f32(20, 37))),
        r"adapter\.gate_up: got \[20, 37\], want \[out, in\] = \[22, 37\]",
    ),
    (
        "adapter's outputs",
        adapter_with(down=pack_weight(f32(36, 11))),
        r"adapter\.down: got \[36, 11\], want \[out, in\] = \[37, 11\]",
    ),
    ("slots", {"slots": int32([1, 1])}, r"slots: slot 1 is named by two rows"),
    ("strategy", {"strategy": "solve"}, r"strategy: got 'solve', want 'serial' or 'hybrid' or 'exact'"),
    ("grad", {"table": f32(53, 37).requires_grad_()}, r"table: got a tensor that requires grad"),
]


@pytest.mark.parametrize(("changes", "message"), [pytest.param(*case[1:], id=case[0]) for case in ERRORS])
def test_errors(changes: dict[str, Any], message: str) -> None:
    call = plain_call(**changes)
    before = {name: [pool.clone() for pool in call[name]] for name in POOLS}
    with pytest.raises(ValueError, match=f"^{message}"):
        ops.draft_step(**arguments(call))
    expect_pools(call, before)


def test_types() -> None:
    for name, want in (("weights", "BlockStack"), ("head", "PackedWeight")):
        with pytest.raises(TypeError, match=f"^{name}: got NoneType, want {want}"):
            ops.draft_step(**arguments(plain_call(**{name: None})))
    for name, want in (("drafting", "Drafting"), ("place", "DraftPlace")):
        with pytest.raises(TypeError, match=f"^{name}: got NoneType, want {want}"):
            ops.draft_step(**{**arguments(plain_call()), name: None})
    with pytest.raises(TypeError, match=r"^prefix: got tuple, want StackPrefix"):
        ops.draft_step(**arguments(plain_call(prefix=(1,))))
    with pytest.raises(TypeError, match=r"^adapter: got tuple, want DraftAdapter"):
        ops.draft_step(**arguments(plain_call(adapter=(1,))))
    with pytest.raises(TypeError, match=r"^adapter\.gate_up: got Tensor, want PackedWeight"):
        ops.draft_step(**arguments(plain_call(**adapter_with(gate_up=f32(22, 37)))))
    with pytest.raises(TypeError, match=r"^own\[1\]: got Tensor, want PackedWeight"):
        ops.draft_step(**arguments(plain_call(own=(f32(37), f32(37, 37)))))
    with pytest.raises(TypeError, match=r"^tokens: got list, want a tensor"):
        ops.draft_step(**arguments(plain_call(tokens=[[1]])))


def test_a_state_of_draft_step_on_another_device_is_refused() -> None:
    call, *_ = random_drafting(2, N=1, NP=3, B=2, ragged=False, tree=False, **SMALL)
    call["states"][0] = call["states"][0].to("meta")
    call["lengths"] = None
    with pytest.raises(ValueError, match="states"):
        ops.draft_step(**arguments(call))
