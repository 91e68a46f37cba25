"""The corpus on disk and the order of its samples."""

import json

import numpy as np
import pytest

from training.data import DataOrder, TokenizedCorpus
from training.prepare_data import prepare


@pytest.fixture
def corpus_folder(tmp_path):
    source = tmp_path / "text"
    source.mkdir()
    (source / "a.txt").write_bytes(bytes(range(200)))
    (source / "b.txt").write_bytes(bytes(range(100)))
    prepare(source, "*.txt", tmp_path / "corpus", shard_tokens=150)
    return tmp_path / "corpus"


def test_samples_are_consecutive_and_share_one_token(corpus_folder):
    corpus = TokenizedCorpus(corpus_folder)
    assert corpus.tokens(0, 16).tolist() == list(range(17))
    assert corpus.tokens(1, 16).tolist() == list(range(16, 33))
    assert corpus.tokens(0, 16).dtype == np.int64


def test_a_sample_never_crosses_a_shard(corpus_folder):
    # 302 tokens in shards of 150, 150 and 2: 9 samples of 16 in each of the first two.
    corpus = TokenizedCorpus(corpus_folder)
    assert corpus.num_samples(16) == 18
    assert corpus.tokens(9, 16).tolist() == list(range(150, 167))
    assert len(corpus.tokens(17, 16)) == 17


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "index.json").unlink(), "index.json cannot be read"),
        (lambda folder: (folder / "index.json").write_text("{"), "is not JSON"),
        (lambda folder: (folder / "shard-00001.bin").unlink(), "shard-00001.bin is missing, 300 bytes expected"),
        (lambda folder: (folder / "shard-00000.bin").write_bytes(b"x"), "shard-00000.bin is 1 bytes long, 300 bytes"),
        (lambda folder: (folder / "index.json").write_text(json.dumps({"format_version": 9})), "format version 9"),
    ],
)
def test_a_damaged_corpus_is_refused_by_name(corpus_folder, damage, message):
    damage(corpus_folder)
    with pytest.raises(ValueError, match="prepare") as caught:
        TokenizedCorpus(corpus_folder)
    assert message in str(caught.value)


def test_the_order_of_a_step_is_the_same_whoever_asks_and_in_whatever_order():
    one, other = DataOrder(50, 8, seed=3), DataOrder(50, 8, seed=3)
    expected = [one.sample_ids(step).tolist() for step in range(1, 30)]
    assert [other.sample_ids(step).tolist() for step in range(29, 0, -1)] == expected[::-1]
    assert DataOrder(50, 8, seed=4).sample_ids(1).tolist() != expected[0]


def test_each_epoch_visits_every_sample_once_though_batches_straddle_epochs():
    order = DataOrder(50, 8, seed=3)
    visited = np.concatenate([order.sample_ids(step) for step in range(1, 26)])  # 200 samples: four epochs
    epochs = visited.reshape(4, 50)
    for epoch in epochs:
        assert sorted(epoch) == list(range(50))
    assert not np.array_equal(epochs[0], epochs[1])


def test_a_batch_larger_than_the_corpus_goes_round_it():
    assert sorted(DataOrder(3, 6, seed=0).sample_ids(1).tolist()) == [0, 0, 1, 1, 2, 2]


def test_a_corpus_without_a_whole_sample_is_refused():
    with pytest.raises(ValueError, match="lower seq_len or prepare a larger corpus"):
        DataOrder(0, 8, seed=0)


@pytest.mark.parametrize(("world_size", "micro_batch_size"), [(1, 8), (2, 2), (4, 2), (8, 1)])
def test_the_ranks_together_have_exactly_the_steps_samples(world_size, micro_batch_size):
    order = DataOrder(100, 16, seed=1)
    micro_batches = [order.rank_sample_ids(3, rank, world_size, micro_batch_size) for rank in range(world_size)]
    assert {len(batches) for batches in micro_batches} == {16 // world_size // micro_batch_size}
    ids = [sample for batches in micro_batches for batch in batches for sample in batch]
    assert sorted(ids) == sorted(order.sample_ids(3).tolist())


def test_the_order_is_the_documented_one_in_every_version_of_numpy():
    # A change here would change the data order of every run under way.
    assert DataOrder(10, 10, seed=1234).sample_ids(1).tolist() == [8, 9, 5, 0, 2, 6, 4, 7, 1, 3]
