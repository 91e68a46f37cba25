"""The one rule by which a run comes back: the newest step that every rank can restore, from the cheapest tier."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Tier = Literal["memory", "local", "durable"]
_CHEAPEST_FIRST: tuple[Tier, ...] = ("memory", "local", "durable")


@dataclass(frozen=True)
class Candidate:
    """A step that every rank could restore from a tier."""

    step: int
    tier: Tier


def candidates(*, memory: Sequence[Collection[int]], local: Collection[int], durable: Iterable[int]) -> list[Candidate]:
    """What to try, in this order, until one loads and verifies.

    Newest step first, since a step done again costs more than any read; of one step the cheapest tier.

    Args:
        memory: for each rank the steps that it holds staged; a step counts when all hold it.
        local: steps that every rank has on its node or a peer's.
        durable: committed steps on shared storage.
    """
    steps: dict[Tier, set[int]] = {
        "memory": set.intersection(*(set(steps) for steps in memory)) if memory else set(),
        "local": set(local),
        "durable": set(durable),
    }
    found = [Candidate(step, tier) for tier in _CHEAPEST_FIRST for step in steps[tier]]
    return sorted(found, key=lambda one: (-one.step, _CHEAPEST_FIRST.index(one.tier)))
