"""The restore rule as a table, and as a property over every small case."""

import itertools

import pytest

from training.checkpoint.restore import Candidate, candidates

TABLE = [
    # memory of each rank, local, durable -> what is tried, in this order
    ([[], []], [], [], []),
    ([[], []], [], [10, 20], ["durable 20", "durable 10"]),
    ([[20], [20]], [], [10, 20], ["memory 20", "durable 20", "durable 10"]),
    ([[20], []], [], [10], ["durable 10"]),  # one rank is a new process: no memory for anybody
    ([[15, 20], [15]], [], [10], ["memory 15", "durable 10"]),  # one rank had not copied 20 yet
    ([[15], [15]], [20], [10], ["local 20", "memory 15", "durable 10"]),  # newer beats cheaper
    ([[10], [10]], [10], [10], ["memory 10", "local 10", "durable 10"]),  # cheaper first among equals
    ([[], []], [25], [10, 20], ["local 25", "durable 20", "durable 10"]),
    ([[5], [5]], [5], [10], ["durable 10", "memory 5", "local 5"]),  # an old copy is no reason to go back
]


@pytest.mark.parametrize(("memory", "local", "durable", "expected"), TABLE)
def test_the_newest_step_that_all_have_comes_first_and_the_cheapest_tier_of_it(memory, local, durable, expected):
    order = candidates(memory=memory, local=local, durable=durable)
    assert [f"{one.tier} {one.step}" for one in order] == expected


def test_every_small_case_is_ordered_complete_and_never_names_what_a_rank_lacks():
    subsets = [set(chosen) for size in range(3) for chosen in itertools.combinations((1, 2), size)]
    for first, second, local, durable in itertools.product(subsets, repeat=4):
        order = candidates(memory=[first, second], local=local, durable=durable)
        expected = (
            {Candidate(step, "memory") for step in first & second}
            | {Candidate(step, "local") for step in local}
            | {Candidate(step, "durable") for step in durable}
        )
        assert set(order) == expected
        assert len(order) == len(expected)
        assert [one.step for one in order] == sorted((one.step for one in order), reverse=True)
