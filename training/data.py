"""The training data: token shards on disk, and the order in which their samples are visited.

The order is a pure function of (seed, step). The position in the data is therefore one number, the step, whatever
the world size: there is no loader state to save, to lose or to get out of step.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

INDEX = "index.json"
FORMAT_VERSION = 1

SampleIds = npt.NDArray[np.int64]


class TokenizedCorpus:
    """A corpus written by `training.prepare_data`, memory-mapped: opening it reads nothing but the index.

    A sample is `seq_len` consecutive tokens of one shard and the token after them; samples do not overlap but for
    that one. What is left at a shard's end, less than a sample, is not used.
    """

    def __init__(self, path: Path) -> None:
        self.index = read_index(path)
        self._shards = [_open_shard(path, shard, self.index["dtype"]) for shard in self.index["shards"]]

    def num_samples(self, seq_len: int) -> int:
        """Samples of `seq_len` tokens in the whole corpus."""
        return int(self._samples_per_shard(seq_len).sum())

    def tokens(self, sample_id: int, seq_len: int) -> npt.NDArray[np.int64]:
        """Tokens [seq_len + 1] of one sample: inputs are all but the last, labels all but the first."""
        ends = np.cumsum(self._samples_per_shard(seq_len))
        shard = int(np.searchsorted(ends, sample_id, side="right"))
        before = int(ends[shard - 1]) if shard else 0
        start = (sample_id - before) * seq_len
        return self._shards[shard][start : start + seq_len + 1].astype(np.int64)

    def _samples_per_shard(self, seq_len: int) -> SampleIds:
        return np.array([max(0, len(shard) - 1) // seq_len for shard in self._shards], dtype=np.int64)


def read_index(path: Path) -> dict[str, Any]:
    """The index of a corpus.

    Raises:
        ValueError: there is none, or it was written by another version of the format.
    """
    try:
        index = json.loads((path / INDEX).read_text())
    except OSError as error:
        raise ValueError(
            f"corpus {path}: {INDEX} cannot be read ({error.strerror}); "
            "prepare it with `python -m training.prepare_data`"
        ) from error
    except json.JSONDecodeError as error:
        raise ValueError(f"corpus {path}: {INDEX} is not JSON ({error}); prepare the corpus again") from error
    if index.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"corpus {path}: format version {index.get('format_version')}, this trainer reads {FORMAT_VERSION}; "
            "prepare the corpus again"
        )
    return index


def _open_shard(path: Path, shard: dict[str, Any], dtype: str) -> npt.NDArray[Any]:
    file = path / shard["file"]
    expected = shard["tokens"] * np.dtype(dtype).itemsize
    size = file.stat().st_size if file.exists() else None
    if size != expected:
        found = "missing" if size is None else f"{size} bytes long"
        raise ValueError(
            f"corpus {path}: {shard['file']} is {found}, {expected} bytes expected; prepare the corpus again"
        )
    return np.memmap(file, dtype=dtype, mode="r")


class DataOrder:
    """Which samples each optimizer step trains on: every epoch its own permutation of all samples.

    A batch may end one epoch and begin the next; within an epoch no sample is visited twice or left out.
    """

    def __init__(self, num_samples: int, global_batch_size: int, seed: int) -> None:
        if num_samples < 1:
            raise ValueError("the corpus has no whole sample; lower seq_len or prepare a larger corpus")
        self._num_samples = num_samples
        self._global_batch_size = global_batch_size
        self._seed = seed
        self._epoch = -1
        self._permutation = np.empty(0, dtype=np.int64)

    def sample_ids(self, step: int) -> SampleIds:
        """Sample ids [global_batch_size] of 1-based `step`."""
        first = (step - 1) * self._global_batch_size
        positions = np.arange(first, first + self._global_batch_size, dtype=np.int64)
        epochs = positions // self._num_samples
        ids = np.empty_like(positions)
        for epoch in np.unique(epochs):  # ascending, so the last one stays cached for the next step
            chosen = epochs == epoch
            ids[chosen] = self._permuted(int(epoch))[positions[chosen] % self._num_samples]
        return ids

    def rank_sample_ids(self, step: int, rank: int, world_size: int, micro_batch_size: int) -> list[SampleIds]:
        """This rank's micro-batches of `step`, each [micro_batch_size].

        Together the ranks' micro-batches are `sample_ids(step)`, whatever the world size.
        """
        micro_steps = self.sample_ids(step).reshape(-1, world_size, micro_batch_size)
        return [ranks[rank] for ranks in micro_steps]

    def _permuted(self, epoch: int) -> SampleIds:
        if epoch != self._epoch:
            # PCG64 by name: numpy may change what default_rng is, and with it the order of a run under way.
            generator = np.random.Generator(np.random.PCG64([self._seed, epoch]))
            self._permutation = generator.permutation(self._num_samples)
            self._epoch = epoch
        return self._permutation
