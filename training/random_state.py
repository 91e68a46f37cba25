"""The generators of one rank (python, numpy, torch, CUDA): seeded, taken as tensors, put back."""

import math
import random

import numpy as np
import torch

from training import device as devices


def seed_random_state(seed: int, rank: int) -> None:
    """Seed python's, numpy's and torch's generators, each rank differently."""
    random.seed(f"{seed}-{rank}")
    np.random.seed((seed * 1_000_003 + rank) % 2**32)
    torch.manual_seed(seed * 1_000_003 + rank)  # CUDA's too


def random_state_tensors(device: torch.device) -> dict[str, torch.Tensor]:
    """The state of every generator as tensors of fixed shape, so that DCP can load them in place."""
    version, words, gauss = random.getstate()
    assert version == 3, version
    name, keys, position, has_gauss, cached = np.random.get_state()
    assert name == "MT19937", name
    state = {
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([math.nan if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.tensor([*(int(key) for key in keys), position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    gpu = devices.random_state(device)
    return state if gpu is None else state | {"cuda": gpu}


def restore_random_state(state: dict[str, torch.Tensor]) -> None:
    """Put every generator back into the state that `random_state_tensors` took."""
    gauss = state["python_gauss"].item()
    random.setstate((3, tuple(state["python"].tolist()), None if math.isnan(gauss) else gauss))
    *keys, position, has_gauss = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, state["numpy_gauss"].item()))
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        devices.set_random_state(state["cuda"])
