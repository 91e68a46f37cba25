"""The corpus reader on hand-written corpora, and the order of samples."""

import hashlib
import json
import tracemalloc

import numpy as np
import pytest

from training.config import MODEL_PRESETS, DataConfig
from training.data import DataOrder, TokenizedCorpus


def write_corpus(directory, shards, dtype="uint16", **changes):
    directory.mkdir(exist_ok=True)
    entries = []
    for number, tokens in enumerate(shards):
        data = np.array(tokens, dtype=np.dtype(dtype).newbyteorder("<")).tobytes()
        (directory / f"part-{number}.bin").write_bytes(data)
        entries.append(
            {"file": f"part-{number}.bin", "tokens": len(tokens), "sha256": hashlib.sha256(data).hexdigest()}
        )
    index = {
        "format_version": 1,
        "tokenizer": "bytes",
        "vocab_size": 257,
        "dtype": dtype,
        "end_of_document": 256,
        "documents": 1,
        "total_tokens": sum(len(tokens) for tokens in shards),
        "settings": {},
        "shards": entries,
        **changes,
    }
    (directory / "index.json").write_text(json.dumps(index))
    return directory


def one_line(error):
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("shards", [[range(23)], [range(10), range(10, 23)], [[n] for n in range(23)]])
def test_samples_follow_each_other_and_share_one_label_whatever_the_shards(tmp_path, shards):
    corpus = TokenizedCorpus(write_corpus(tmp_path, [list(shard) for shard in shards]))

    samples = [corpus.tokens(n, 5) for n in range(corpus.num_samples(5))]

    assert [sample.tolist() for sample in samples] == [list(range(5 * n, 5 * n + 6)) for n in range(4)]
    assert all(sample.dtype == np.int64 for sample in samples)


@pytest.mark.parametrize(("total", "expected"), [(5, 0), (6, 1), (10, 1), (11, 2)])
def test_a_sample_needs_its_inputs_and_one_label(tmp_path, total, expected):
    assert TokenizedCorpus(write_corpus(tmp_path, [list(range(total))])).num_samples(5) == expected


@pytest.mark.parametrize("sample_id", [-1, 4])
def test_a_sample_outside_the_corpus_is_an_error(tmp_path, sample_id):
    corpus = TokenizedCorpus(write_corpus(tmp_path, [list(range(23))]))

    with pytest.raises(IndexError, match=f"sample {sample_id} of 4"):
        corpus.tokens(sample_id, 5)


def test_wide_tokens_are_read_whole(tmp_path):
    corpus = TokenizedCorpus(write_corpus(tmp_path, [[70_000, 128_255, 1]], dtype="uint32", vocab_size=128_256))

    assert corpus.tokens(0, 2).tolist() == [70_000, 128_255, 1]


def test_a_missing_corpus_says_how_to_write_one(tmp_path):
    with pytest.raises(ValueError, match="prepare_data --out") as error:
        TokenizedCorpus(tmp_path / "none")
    assert str(tmp_path / "none" / "index.json") in one_line(error)


def test_a_missing_shard_is_an_error(tmp_path):
    (write_corpus(tmp_path, [[1, 2], [3]]) / "part-1.bin").unlink()

    with pytest.raises(ValueError, match=r"part-1\.bin: cannot be read \(No such file") as error:
        TokenizedCorpus(tmp_path)
    one_line(error)


def test_a_truncated_shard_is_an_error(tmp_path):
    (write_corpus(tmp_path, [[1, 2], [3, 4]]) / "part-1.bin").write_bytes(b"\0\0\0")

    with pytest.raises(ValueError, match=r"part-1\.bin: 3 bytes, index\.json says 4; .*prepare") as error:
        TokenizedCorpus(tmp_path)
    one_line(error)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "format version 2, this code reads 1"),
        ({"dtype": "int8"}, "dtype: "),
        ({"surprise": 1}, "surprise: unknown key"),
        ({"total_tokens": 7, "documents": 0}, "documents: "),
        ({"total_tokens": 7}, "total_tokens is 7, its shards hold 3"),
    ],
)
def test_an_index_that_breaks_the_format_is_an_error(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        TokenizedCorpus(write_corpus(tmp_path, [[1, 2, 3]], **changes))
    assert "prepare the corpus again" in one_line(error)


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "\xff"])
def test_an_index_that_is_no_index_is_an_error(tmp_path, content):
    (tmp_path / "index.json").write_bytes(content.encode("latin-1"))

    with pytest.raises(ValueError, match="prepare the corpus again") as error:
        TokenizedCorpus(tmp_path)
    one_line(error)


def test_a_changed_byte_fails_the_checksum(tmp_path):
    corpus = TokenizedCorpus(write_corpus(tmp_path, [[1, 2], [3, 4]]))
    corpus.verify_checksums()

    (tmp_path / "part-1.bin").write_bytes(b"\3\0\5\0")

    with pytest.raises(ValueError, match=r"part-1\.bin: damaged") as error:
        corpus.verify_checksums()
    one_line(error)


def test_a_corpus_for_another_tokenizer_or_a_larger_vocabulary_does_not_fit(tmp_path):
    corpus, model = TokenizedCorpus(write_corpus(tmp_path, [[1, 2]])), MODEL_PRESETS["debug-3m"]
    data = DataConfig(path=str(tmp_path), tokenizer="bytes")
    corpus.check_fits(data, model)

    with pytest.raises(ValueError, match="'bytes', but data.tokenizer is 'other'"):
        corpus.check_fits(data.model_copy(update={"tokenizer": "other"}), model)
    with pytest.raises(ValueError, match=r"257 tokens exceeds model\.vocab_size 256"):
        corpus.check_fits(data, model.model_copy(update={"vocab_size": 256}))


def stream(order, steps):
    return np.concatenate([order.sample_ids(step) for step in range(1, steps + 1)])


@pytest.mark.parametrize(("num_samples", "batch"), [(1, 1), (1, 3), (2, 3), (3, 8), (10, 4), (12, 4), (100, 7)])
def test_every_epoch_is_a_permutation_even_when_batches_straddle_epochs(num_samples, batch):
    epochs = stream(DataOrder(num_samples, batch, seed=3), steps=4 * num_samples)
    epochs = epochs[: len(epochs) // num_samples * num_samples].reshape(-1, num_samples)

    assert (np.sort(epochs, axis=1) == np.arange(num_samples)).all()


def test_epochs_and_seeds_differ():
    one, other = DataOrder(100, 100, seed=3), DataOrder(100, 100, seed=4)

    assert (one.sample_ids(1) != one.sample_ids(2)).sum() > 80
    assert (one.sample_ids(1) != other.sample_ids(1)).sum() > 80


def test_a_step_s_samples_do_not_depend_on_what_was_asked_before():
    walked = DataOrder(50, 8, seed=3)
    stream(walked, steps=20)

    assert (walked.sample_ids(7) == DataOrder(50, 8, seed=3).sample_ids(7)).all()


def test_the_order_is_the_one_that_earlier_runs_used():
    """A change here means that a resumed run trains on other samples than it would have."""
    assert DataOrder(31_000, 6, seed=1234).sample_ids(1).tolist() == [27953, 7666, 26277, 20282, 26301, 29774]
    assert DataOrder(10, 4, seed=0).sample_ids(1_000_003).tolist() == [7, 6, 4, 1]


def test_places_of_a_sample_are_spread_evenly_over_epochs():
    order = DataOrder(10, 10, seed=3)
    first = np.bincount([order.sample_ids(epoch)[0] for epoch in range(1, 2001)], minlength=10)

    # Chi-square with 9 degrees of freedom: above 33.7 once in 10,000 seeds, and the seed is fixed.
    assert ((first - 200) ** 2 / 200).sum() < 33.7


def test_the_order_keeps_no_trace_of_the_corpus_order():
    ids = DataOrder(30_000, 30_000, seed=3).sample_ids(1)

    assert abs(np.corrcoef(ids, np.arange(30_000))[0, 1]) < 0.03
    assert abs(np.corrcoef(ids[1:], ids[:-1])[0, 1]) < 0.03
    assert (np.diff(ids) == 1).sum() < 10


def test_a_huge_epoch_costs_no_memory():
    tracemalloc.start()
    ids = DataOrder(2_000_000_000, 256, seed=3).sample_ids(123_456_789)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 1 << 20
    assert len(set(ids.tolist())) == 256


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 12])
def test_ranks_share_out_the_batch_for_every_world_size(world_size):
    order = DataOrder(1000, 24, seed=3)

    parts = [order.rank_sample_ids(5, rank, world_size, micro_batch_size=2) for rank in range(world_size)]

    assert all(len(part) == 24 // (2 * world_size) for part in parts)
    assert all(ids.shape == (2,) for part in parts for ids in part)
    flat = np.concatenate([ids for part in parts for ids in part])
    assert sorted(flat) == sorted(order.sample_ids(5))


def test_no_samples_is_an_error():
    with pytest.raises(ValueError, match="lower seq_len"):
        DataOrder(0, 4, seed=0)
