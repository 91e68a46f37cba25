"""Validation loss on a held-out corpus: the same samples and the same sum at every world size."""

from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from training.config import EvaluationConfig, TrainConfig
from training.data import TokenizedCorpus
from training.model import Llama


class Evaluation:
    """The held-out samples of one run.

    Raises:
        ValueError: no such corpus, another tokenizer, or fewer samples than asked for.
    """

    def __init__(self, config: TrainConfig, settings: EvaluationConfig) -> None:
        self._config = config
        self._samples = settings.sequences
        self._corpus = TokenizedCorpus(Path(settings.path))
        self._corpus.check_fits(config.data, config.model)
        available = self._corpus.num_samples(config.seq_len)
        if available < self._samples:
            raise ValueError(
                f"evaluation.sequences {self._samples} exceeds the {available} samples of seq_len {config.seq_len} "
                f"in {settings.path}; lower it or add text"
            )

    @torch.no_grad()
    def loss(self, model: Llama, *, device: torch.device) -> float:
        """Mean cross entropy in nats over all tokens of all samples. Collective.

        Each sample's loss comes to its own place in one vector, which is then added up in order: how the samples were
        dealt out to ranks does not count.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        size = self._config.micro_batch_size
        end = self._corpus.index.end_of_document if self._config.data.mask_documents else None
        losses = torch.zeros(self._samples, device=device)
        # Every rank calls forward equally often, since each call gathers parameters from all of them; those that have
        # run out of samples compute the last one again, and its loss is not counted.
        for start in range(0, self._samples, size * world_size):
            wanted = np.arange(start + rank * size, start + (rank + 1) * size)
            tokens = self._load(np.minimum(wanted, self._samples - 1)).to(device)
            found = model(tokens[:, :-1], tokens[:, 1:], end_of_document=end, per_token=True).mean(dim=1)
            counted = int((wanted < self._samples).sum())
            losses[wanted[:counted]] = found[:counted]
        cast(FSDPModule, model).reshard()  # no backward comes, which would give the gathered root parameters back
        dist.all_reduce(losses)
        return losses.double().mean().item()

    def _load(self, sample_ids: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(
            np.stack([self._corpus.tokens(int(sample_id), self._config.seq_len) for sample_id in sample_ids])
        )
