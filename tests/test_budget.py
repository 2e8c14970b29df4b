"""The draft budget's estimates."""

from __future__ import annotations

from specdec.budget import DraftBudget, RoundCost


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
