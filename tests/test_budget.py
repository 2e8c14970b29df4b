"""The draft budget's estimates."""

from __future__ import annotations

from specdec.budget import DraftBudget, RoundCost, SequenceBudget


def test_a_cold_first_round_does_not_make_nodes_look_free() -> None:
    cost = RoundCost()
    cost.observe(5, 10.0)  # cold: slower than what follows
    for _ in range(20):
        cost.observe(17, 7.0)
    assert cost(1) < cost(7) < cost(17)
    # Rounds of one size say nothing about the slope: it is the prior's, where one node costs under half.
    assert cost(1) < 0.5 * cost(17)


def test_rounds_of_several_sizes_give_the_true_line() -> None:
    cost = RoundCost()
    for i in range(200):
        nodes = 1 + i % 9
        cost.observe(nodes, 2.0 + 0.1 * nodes)
    for nodes in (1, 5, 9, 17):
        expected = 2.0 + 0.1 * nodes
        assert abs(cost(nodes) - expected) < 0.02 * expected


def test_falling_times_do_not_turn_the_line_over() -> None:
    cost = RoundCost()
    for i in range(50):
        cost.observe(2 + i % 4, 2.0 - 0.1 * (i % 4))
    assert cost(1) < cost(2) < cost(8) < cost(17)


def test_drafts_stay_short_of_the_limit_where_most_are_wrong() -> None:
    budget = DraftBudget(16)
    for i in range(100):
        nodes = 1 + i % 12
        budget.verify_cost.observe(nodes, 2.0 + 0.1 * nodes)
        budget.observe_acceptance(None, 4, i % 2)  # half of the first tokens are wrong
    assert 0 < budget.after_drafting([None], [16]) < 6


CHAIN = range(1, 17)


def test_a_sequence_drafts_deeper_the_more_is_accepted_and_the_cheaper_it_is() -> None:
    depths = {}
    for name, accepted, cost in (("often", 4, 0.1), ("seldom", 0, 0.1), ("costly", 4, 0.6)):
        budget = SequenceBudget(CHAIN, cost)
        for _ in range(50):
            budget.observe(5, accepted)
        depths[name] = budget.depth()
    assert depths["seldom"] == 0
    assert 0 < depths["costly"] < depths["often"] <= 16
    # The nodes of a tree cost more than those of a chain of the same depth.
    chain, tree = SequenceBudget(CHAIN, 0.1), SequenceBudget([4 * n for n in CHAIN], 0.1)
    assert 0 < tree.depth() < chain.depth()


def test_a_sequence_that_stopped_drafting_tries_again_ever_more_rarely() -> None:
    budget = SequenceBudget(CHAIN, 0.5, explore_every=4)
    for _ in range(20):
        budget.observe(3, 0)
    depths = [budget.depth() for _ in range(28)]
    assert [i for i, depth in enumerate(depths, 1) if depth] == [4, 12, 28]
    assert max(depths) == 2


def test_equal_histories_give_equal_depths_whatever_the_clock_says() -> None:
    shared = DraftBudget(16)
    first = shared.for_sequence(CHAIN, 0.2)
    for _ in range(10):
        shared.verify_cost.observe(17, 1e3)
        shared.observe_draft(1, 1e3)
        shared.observe_acceptance(None, 4, 0)
    second = shared.for_sequence(CHAIN, 0.2)
    assert first.depth() == second.depth() > 0
    assert DraftBudget(16, adaptive=False).for_sequence([2, 4, 6], 0.2).depth() == 3
    assert DraftBudget(0).for_sequence([], 0.2).depth() == 0
