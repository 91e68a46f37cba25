"""The file of a local checkpoint: every way in which it can be wrong is noticed and named."""

import random
import struct
import time

import pytest
import torch
import xxhash

from training.checkpoint import local_file
from training.checkpoint.layout import tensor_layout
from training.checkpoint.local_file import Header, LocalCheckpointError, as_bytes, payload_order, shards_from

TENSORS = {
    "bytes": torch.arange(7, dtype=torch.uint8),
    "wide": torch.arange(5, dtype=torch.float64),
    "flag": torch.tensor(True),
    "narrow": torch.arange(9, dtype=torch.bfloat16).reshape(3, 3),
    "eight bits": torch.arange(6, dtype=torch.float32).to(torch.float8_e4m3fn),
    "complex": torch.tensor([1 + 2j, 3j], dtype=torch.complex64),
    "nothing": torch.empty(0, 3),
    "transposed": torch.arange(6, dtype=torch.float32).reshape(2, 3).T,
}


def write_one(path):
    layouts = payload_order({name: tensor_layout(tensor) for name, tensor in TENSORS.items()})
    header = Header("run", 10, 1, 2, "abc", layouts, {"loss": 0.1 + 0.2, "name": "ü"})
    return header, *local_file.write(path, header, [as_bytes(TENSORS[name]) for name in layouts])


def test_every_dtype_comes_back_to_the_bit_with_its_layout_and_manifest(tmp_path):
    header, size, digest = write_one(tmp_path / "file")
    assert size == (tmp_path / "file").stat().st_size
    read, rows, read_digest = local_file.read(tmp_path / "file")
    assert read == header
    assert list(read.layouts) == list(header.layouts)
    assert read_digest == digest == local_file.payload_digest(rows)
    shards = shards_from(read, rows)
    for name, tensor in TENSORS.items():
        assert shards[name].dtype == tensor.dtype
        assert shards[name].shape == tensor.shape
        assert torch.equal(as_bytes(shards[name]), as_bytes(tensor)), name
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_staged_memory_is_read_in_place():
    tensor = torch.zeros(10).share_memory_()
    assert as_bytes(tensor).data_ptr() == tensor.data_ptr()


def test_any_one_flipped_bit_anywhere_is_noticed(tmp_path):
    path = tmp_path / "file"
    write_one(path)
    good = path.read_bytes()
    seed = time.time_ns() % 1_000_000
    print(f"seed {seed}")
    chance = random.Random(seed)
    for offset in [*range(40), *range(len(good) - 40, len(good)), *chance.sample(range(len(good)), 300)]:
        damaged = bytearray(good)
        damaged[offset] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        for check in (local_file.read, local_file.verify):
            with pytest.raises(LocalCheckpointError, match=str(path)):
                check(path)
    path.write_bytes(good)
    assert local_file.verify(path) == local_file.read(path)[0]


def test_any_other_length_is_noticed_by_the_header_alone(tmp_path):
    path = tmp_path / "file"
    write_one(path)
    good = path.read_bytes()
    for data in [*(good[:length] for length in range(0, len(good), 7)), good[:-1], good + b"x"]:
        path.write_bytes(data)
        with pytest.raises(LocalCheckpointError, match=str(path)):
            local_file.read_header(path)


@pytest.mark.parametrize(
    "head", [b"[]", b"{}", b"3", b'{"layouts": []}', b'{"layouts": {"w": 3}}', b"\xff", b'{"layouts": {}, "more": 1}']
)
def test_a_header_with_a_true_checksum_and_other_contents_is_refused(tmp_path, head):
    path = tmp_path / "file"
    path.write_bytes(struct.pack("<8sQ16s", b"LOCALCK1", len(head), xxhash.xxh3_128_digest(head)) + head)
    with pytest.raises(LocalCheckpointError, match="is damaged"):
        local_file.read_header(path)


def test_what_can_not_be_read_is_named(tmp_path):
    with pytest.raises(LocalCheckpointError, match="file can't be read: No such file or directory"):
        local_file.read(tmp_path / "file")
    with pytest.raises(LocalCheckpointError, match="can't be read: Is a directory"):
        local_file.read_header(tmp_path)


def test_a_file_that_is_still_being_written_is_never_overwritten(tmp_path):
    (tmp_path / "file.dirty").write_bytes(b"another writer's")
    with pytest.raises(FileExistsError):
        write_one(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file.dirty"]
