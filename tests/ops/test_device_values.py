"""A GPU's kernels and values that nobody checks: no access leaves its tensor, the other rows are right."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ops.backends import UNCHECKED, Backend, simt_library
from ops.cases import assert_close, int32, random_case, random_factors, tolerance
from ops.layers import random_layer, with_pools
from specdec.ops import ConvPending, ConvPrefix, Pending, Prefix

HUGE = 1 << 30
pytestmark = pytest.mark.parametrize("backend", UNCHECKED)


@pytest.fixture(autouse=True)
def unchecked(backend: Backend) -> Iterator[None]:
    """The executor's operators look at no values, as those of a GPU."""
    if backend.name != "simt":
        yield
        return
    simt_library().specdec_simt_check_values(0)
    yield
    simt_library().specdec_simt_check_values(1)


WILD = [[0, 1, 2, HUGE, 4], [-7, 5, 1, 2, -HUGE], [-1, 0, 1, 2, 3]]  # the last row is as it should be


@pytest.mark.parametrize("strategy", ["serial", "hybrid", "solve"])
def test_verify(backend: Backend, strategy: str) -> None:
    case = random_case(1, B=3, N=5, tree=False, padding=False, ragged=False, poison=False)
    state = case.state.clone()
    how = {"slots": int32([HUGE, 1, 3]), "lengths": int32([5, HUGE, 5]), "strategy": strategy}
    out, factors = backend.verify(*case.tokens, state=state, parents=int32(WILD), **how)
    assert (out[0] == 0).all()
    assert (factors.u[0] == 0).all()
    assert out[1].isfinite().all()
    want, _ = backend.verify(*case.tokens, state=state, parents=None, **how)
    assert_close(out[2], want[2], tolerance(torch.float32, 5, 32, want[2], state), "the row that is right")
    assert torch.equal(state, case.state)


@pytest.mark.parametrize("strategy", ["serial", "hybrid", "solve"])
def test_pending(backend: Backend, strategy: str) -> None:
    case = random_case(2, B=3, N=5, tree=False, padding=False, ragged=False, poison=False)
    factors = random_factors(torch.Generator().manual_seed(3), 3, 4, 2, 4, 32, 64, "head")
    state, alone = case.state.clone(), case.state.clone()
    how = {"slots": int32([HUGE, 1, 3]), "strategy": strategy, "state": state}
    path = int32([[0, 1, 2, 3, HUGE, 5], [HUGE, -3, 2, 2, 9, 9], [0, 2, 3, 9, 9, 9]])
    backend.verify(*case.tokens, pending=Pending(factors, path, int32([6, HUGE, 3])), **how)
    assert torch.equal(state[[0, 2, 4]], case.state[[0, 2, 4]])
    assert state[1].isfinite().all()
    backend.commit(alone, factors, path, int32([6, HUGE, 3]), slots=how["slots"])
    assert_close(state, alone, tolerance(torch.float32, 4, 32, alone, alone), "state")


@pytest.mark.parametrize("strategy", ["serial", "hybrid"])
def test_prefix(backend: Backend, strategy: str) -> None:
    case = random_case(4, B=3, N=5, tree=False, padding=False, ragged=False, poison=False)
    factors = random_factors(torch.Generator().manual_seed(5), 3, 5, 2, 4, 32, 64, "head")

    def verify(parents: Tensor) -> Tensor:
        return backend.verify(
            *case.tokens, state=case.state, slots=case.slots, parents=parents, strategy=strategy,
            prefix=Prefix(factors, parents),
        )[0]  # fmt: skip

    out = verify(int32(WILD))
    assert out.isfinite().all()
    assert torch.equal(out[2], verify(int32([WILD[2]] * 3))[2])


def test_commit_into_no_nodes(backend: Backend) -> None:
    case = random_case(6, B=2, padding=False, poison=False)
    factors = random_factors(torch.Generator().manual_seed(7), 2, 0, 2, 4, 32, 64, "head")
    state = case.state.clone()
    backend.commit(state, factors, int32([[3, 9]] * 2), slots=case.slots)
    assert torch.equal(state, case.state)


def test_convolution(backend: Backend) -> None:
    rng = torch.Generator().manual_seed(8)
    x, before = torch.randn(2, 3, 5, 24, generator=rng)
    window, weight = torch.randn(5, 3, 24, generator=rng), torch.randn(24, 4, generator=rng)
    slots, wild = int32([HUGE, 1, 3]), int32(WILD)
    moved = window.clone()
    y = backend.conv_verify(x, weight, conv_state=moved, slots=slots, parents=wild)
    assert (y[0] == 0).all()
    assert torch.equal(y[2], backend.conv_verify(x, weight, conv_state=moved, slots=slots)[2])
    y = backend.conv_verify(
        x, weight, conv_state=moved, slots=slots, parents=wild, prefix=ConvPrefix(before, wild)
    )
    assert y.isfinite().all()
    assert torch.equal(moved, window)
    backend.conv_verify(x, weight, conv_state=moved, slots=slots, pending=ConvPending(before, wild))
    backend.conv_commit(window, before, wild, slots=slots)
    assert torch.equal(moved, window)


def test_attention(backend: Backend) -> None:
    """Also a prefix of any shape, and a cache that holds more than it has room for."""
    rng = torch.Generator().manual_seed(12)
    q, k, v, before = torch.randn(4, 3, 5, 2, 32, generator=rng)
    k_cache, v_cache = torch.randn(2, 5, 2, 20, 32, generator=rng)
    slots, committed = int32([HUGE, 1, 3]), int32([HUGE, HUGE, HUGE, 20, HUGE])
    how = {"k_cache": k_cache, "v_cache": v_cache, "cache_lengths": committed, "slots": slots}
    out = backend.tree_attention(q, k, v, parents=int32(WILD), lengths=int32([5, HUGE, 5]), **how)
    assert (out[0] == 0).all()
    assert out[1].isfinite().all()
    assert torch.equal(out[2], backend.tree_attention(q, k, v, **how)[2])
    below = backend.tree_attention(
        q, k, v, parents=int32(WILD), prefix_k=before, prefix_v=before, prefix_parents=int32(WILD), **how
    )
    assert below[1:].isfinite().all()


@pytest.mark.parametrize("earlier", ["none", "pending", "prefix"])
def test_layer(backend: Backend, earlier: str) -> None:
    how = {"B": 3, "N": 5, "HK": 1, "HV": 2, "DV": 32, "ragged": False, "tree": False, "earlier": earlier}
    call = random_layer(11, **how)
    wild, lengths = int32(WILD), int32([5, HUGE, 5])
    call |= {"slots": int32([HUGE, 1, 3]), "lengths": lengths}
    if earlier == "pending":
        call["pending"] = call["pending"]._replace(path=wild, path_lengths=lengths)
    if earlier == "prefix":
        call["prefix"] = call["prefix"]._replace(parents=wild)
    trees, chains = with_pools(call), with_pools(call)
    out, _ = backend.verify_layer(**{**trees, "parents": wild})
    assert (out[0] == 0).all()
    assert out[1].isfinite().all()
    want, _ = backend.verify_layer(**chains)
    if earlier != "prefix":  # whose nodes come first: the last row's tree is another one there
        assert torch.equal(out[2], want[2])
    for name in ("state", "conv_state"):
        assert torch.equal(trees[name][[0, 2, 4]], call[name][[0, 2, 4]])
        assert trees[name].isfinite().all()
    few = with_pools({**call, "conv_state": call["conv_state"][:3]})
    out, _ = backend.verify_layer(**few)
    assert (out[2] == 0).all(), "a slot of one pool alone is padding"
    assert torch.equal(few["state"][3], call["state"][3])


def test_prefill(backend: Backend) -> None:
    case = random_case(9, B=1, N=12, tree=False, padding=False, ragged=False, poison=False)
    state = case.state.clone()
    ends = int32([-5, 4, 4, HUGE])
    backend.prefill(*case.tokens, state=state[:3], slots=int32([0, HUGE, 2]), cu_seqlens=ends)
    assert torch.equal(state[1], case.state[1])
    for slot, tokens in ((0, slice(0, 4)), (2, slice(4, 12))):
        alone = case.state[slot : slot + 1].clone()
        backend.prefill(*(t[:, tokens] for t in case.tokens), state=alone)
        limit = tolerance(torch.float32, 12, 32, alone, alone)
        assert_close(state[slot], alone[0], limit, f"slot {slot}")


def test_findings_are_raised(backend: Backend) -> None:
    """Sequences that overlap write the same rows: the executor says so, with the seed that repeats it."""
    if backend.name != "simt":
        pytest.skip("for the executor")
    case = random_case(10, B=1, N=12, tree=False, padding=False, ragged=False, poison=False)
    seed = os.environ.get("SPECDEC_SIMT_SEED", "0")
    with pytest.raises(RuntimeError, match=rf"SIMT executor: findings \(seed {seed}\)\n.*: race: "):
        backend.prefill(*case.tokens, state=case.state[:2].clone(), cu_seqlens=int32([0, 8, 4]))
