"""Reads a tokenized corpus and decides which samples each optimizer step takes.

The order is a pure function of (seed, step): a resumed run needs the step number and nothing else.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from training.config import Config, DataConfig, ModelConfig, NonNegativeInt, PositiveInt, describe_errors

FORMAT_VERSION = 1
INDEX_FILE = "index.json"

Int64Array = npt.NDArray[np.int64]


class ShardEntry(Config):
    """One file of little-endian token ids, back to back, without a header."""

    file: str
    tokens: PositiveInt
    sha256: str


class CorpusIndex(Config):
    """index.json: what the shards beside it hold and how they came about."""

    format_version: Literal[1] = FORMAT_VERSION
    tokenizer: str
    vocab_size: PositiveInt
    dtype: Literal["uint16", "uint32"]
    end_of_document: NonNegativeInt
    documents: PositiveInt
    total_tokens: PositiveInt
    settings: dict[str, Any]
    shards: tuple[ShardEntry, ...]


class TokenizedCorpus:
    """A corpus on disk as one stream of tokens, read through memory maps.

    Shards are only how the stream is stored: samples run across their borders, so that the samples of a corpus do
    not depend on the size of its shards.

    Raises:
        ValueError: no corpus, an incomplete or truncated one, or a format this version doesn't read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index = _read_index(path)
        self._shards = [_map_shard(path, shard, self.index.dtype) for shard in self.index.shards]
        self._ends = np.cumsum([shard.tokens for shard in self.index.shards])

    @property
    def fingerprint(self) -> str:
        """Hash of all tokens in their order, from the index: equal for equal content, wherever it lies."""
        return hashlib.sha256("".join(shard.sha256 for shard in self.index.shards).encode()).hexdigest()

    def num_samples(self, seq_len: int) -> int:
        """Samples of `seq_len` inputs; the tokens left over at the end are not used."""
        return (self.index.total_tokens - 1) // seq_len

    def tokens(self, sample_id: int, seq_len: int) -> Int64Array:
        """Sample `sample_id` as [seq_len + 1]: the inputs are all but the last token, the labels all but the first.

        Consecutive samples share one token: the last label of one is the first input of the next.

        Raises:
            IndexError: there is no such sample.
        """
        if not 0 <= sample_id < self.num_samples(seq_len):
            raise IndexError(f"{self.path}: sample {sample_id} of {self.num_samples(seq_len)}")
        start, stop = sample_id * seq_len, (sample_id + 1) * seq_len + 1
        parts: list[npt.NDArray[np.integer]] = []
        shard = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            offset = start - (int(self._ends[shard]) - len(self._shards[shard]))
            part = self._shards[shard][offset : offset + stop - start]
            parts.append(part)
            start += len(part)
            shard += 1
        return np.concatenate(parts).astype(np.int64)

    def check_fits(self, data: DataConfig, model: ModelConfig) -> None:
        """Raise ValueError unless this corpus is what `data` names and its tokens are in the model's vocabulary."""
        if self.index.tokenizer != data.tokenizer:
            raise ValueError(
                f"{self.path}: tokenized with {self.index.tokenizer!r}, but data.tokenizer is {data.tokenizer!r}; "
                "change it or point data.path to another corpus"
            )
        if self.index.vocab_size > model.vocab_size:
            raise ValueError(
                f"{self.path}: vocabulary of {self.index.vocab_size} tokens exceeds model.vocab_size "
                f"{model.vocab_size}; raise it or tokenize again"
            )

    def verify_checksums(self) -> None:
        """Read every shard and compare its SHA-256 with the index.

        Raises:
            ValueError: a shard's bytes are not those that were written.
        """
        for shard in self.index.shards:
            with (self.path / shard.file).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != shard.sha256:
                raise ValueError(
                    f"{self.path / shard.file}: damaged, its SHA-256 differs from {INDEX_FILE}; prepare it again"
                )


class DataOrder:
    """Which samples each optimizer step takes: every epoch is another permutation of all samples.

    Epochs follow each other without a gap: a batch may end one and begin the next, and a corpus smaller than a batch
    simply goes round several times. No permutation is ever held in memory (a rank's share of 10^9 samples would cost
    gigabytes and, on every restart, a minute): single places of it are computed, alike under every NumPy version.

    Raises:
        ValueError: there are no samples.
    """

    def __init__(self, num_samples: int, global_batch_size: int, seed: int) -> None:
        if num_samples < 1:
            raise ValueError("the corpus is shorter than one sample of seq_len + 1 tokens; add text or lower seq_len")
        assert global_batch_size >= 1
        self._num_samples = num_samples
        self._global_batch_size = global_batch_size
        self._seed = seed

    def sample_ids(self, step: int) -> Int64Array:
        """Sample ids [global_batch_size] of the 1-based optimizer step `step`."""
        assert step >= 1, f"steps are 1-based, got {step}"
        first = (step - 1) * self._global_batch_size
        epochs, places = np.divmod(np.arange(first, first + self._global_batch_size), self._num_samples)
        ids = np.empty(self._global_batch_size, dtype=np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            ids[chosen] = _permuted(places[chosen], self._num_samples, _round_keys(self._seed, int(epoch)))
        return ids

    def rank_sample_ids(self, step: int, rank: int, world_size: int, micro_batch_size: int) -> list[Int64Array]:
        """The part of `rank` in `sample_ids(step)`: one array [micro_batch_size] per micro-step.

        Over all ranks it is the whole batch, each sample once, for every world size that divides it
        (`TrainConfig.check_world_size`): after a change of world size the next step trains on the same samples.
        """
        ids = self.sample_ids(step).reshape(-1, world_size, micro_batch_size)
        return list(ids[:, rank])


def _read_index(path: Path) -> CorpusIndex:
    file = path / INDEX_FILE
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(
            f"{file}: cannot be read ({error.strerror}); "
            f"write a corpus with `python -m training.prepare_data --out {path}`"
        ) from error
    except ValueError as error:
        raise ValueError(f"{file}: not JSON ({error}); prepare the corpus again") from error
    # Before anything else: another version may have other keys.
    version = content.get("format_version") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{file}: format version {version!r}, this code reads {FORMAT_VERSION}; prepare the corpus again"
        )
    try:
        index = CorpusIndex.model_validate(content)
    except ValidationError as error:
        raise ValueError(
            f"{file}: {'; '.join(describe_errors(error).splitlines())}; prepare the corpus again"
        ) from error
    stored = sum(shard.tokens for shard in index.shards)
    if stored != index.total_tokens:
        raise ValueError(
            f"{file}: total_tokens is {index.total_tokens}, its shards hold {stored}; prepare the corpus again"
        )
    return index


def _map_shard(path: Path, shard: ShardEntry, dtype: str) -> npt.NDArray[np.integer]:
    file = path / shard.file
    element = np.dtype(dtype).newbyteorder("<")
    expected = shard.tokens * element.itemsize
    try:
        size = file.stat().st_size
        if size == expected:
            return np.memmap(file, dtype=element, mode="r")
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror}); prepare the corpus again") from error
    raise ValueError(f"{file}: {size} bytes, {INDEX_FILE} says {expected}; copy it or prepare the corpus again")


# A pseudo-random permutation of range(n), one place at a time: a Feistel network permutes the 2^(2h) numbers of two
# h-bit halves whatever its round function, and a result outside range(n) is sent through again until it falls inside
# ("cycle walking"; the domain is below 4n, so that takes under 4 passes on average). Changing anything here changes
# the order of the data under every run that resumes.
_ROUNDS = 8


def _round_keys(seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    return np.frombuffer(hashlib.shake_256(f"{seed}/{epoch}".encode()).digest(8 * _ROUNDS), dtype="<u8")


def _permuted(places: Int64Array, n: int, keys: npt.NDArray[np.uint64]) -> Int64Array:
    half_bits = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    values = _feistel(places.astype(np.uint64), half_bits, keys)
    while (outside := values >= n).any():
        values[outside] = _feistel(values[outside], half_bits, keys)
    return values.astype(np.int64)


def _feistel(
    values: npt.NDArray[np.uint64], half_bits: np.uint64, keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << half_bits) | right


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Every output bit depends on every input bit: the finalizer of SplitMix64 (constants by David Stafford)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
