"""The generators of a rank go on where they were saved."""

import random

import numpy as np
import pytest
import torch

from training.random_state import random_state_tensors, restore_random_state, seed_random_state


def draws() -> list:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()]


@pytest.mark.parametrize("already_drawn", [0, 1])
def test_every_generator_goes_on_where_it_was_saved(already_drawn):
    seed_random_state(3, rank=1)
    for _ in range(already_drawn):  # an odd number of Gaussian draws leaves one cached
        draws()
    state = random_state_tensors(torch.device("cpu"))
    expected = draws()
    seed_random_state(4, rank=0)
    restore_random_state(state)
    assert draws() == expected


def test_the_saved_random_state_has_a_fixed_shape_whatever_was_drawn():
    before = {name: tensor.shape for name, tensor in random_state_tensors(torch.device("cpu")).items()}
    draws()
    assert {name: tensor.shape for name, tensor in random_state_tensors(torch.device("cpu")).items()} == before


def test_ranks_draw_different_numbers():
    seed_random_state(3, rank=0)
    first = draws()
    seed_random_state(3, rank=1)
    assert all(one != other for one, other in zip(first, draws(), strict=True))
