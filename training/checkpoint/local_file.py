"""The file of a local checkpoint: one rank's shards at one step, readable only as a whole and only when unchanged.

    magic, header length, header checksum | header (JSON) | the shards' bytes | their checksum

No pickle: nothing in a file is run, whoever wrote it. (NVRx 0.7.0 reads its local files by torch.load with
weights_only=False and has no checksum.) Checksums are XXH3-128, which runs at the speed of memory.
"""

import json
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash

from training.checkpoint.layout import TensorLayout

DIRTY = ".dirty"  # NVRx's word for a file that is still being written
_NAME = re.compile(r"step-(\d{8,})\.([0-9a-z]+)\.rank-(\d+)")
_MAGIC = b"LOCALCK1"
_PREFIX = struct.Struct("<8sQ16s")
_DIGEST_BYTES = 16
# Reading: small enough to stay in the processor's cache between the copy and the checksum. Writing happens beside the
# training thread, and after each chunk has to get the interpreter's lock back from it: few, large ones.
_READ_CHUNK = 512 << 10
_WRITE_CHUNK = 16 << 20


class LocalCheckpointError(RuntimeError):
    """A local checkpoint could not be written or read; says which and why."""


@dataclass(frozen=True)
class Header:
    """What a file says about itself. `save_id` is one for all ranks' files of one save."""

    session: str
    step: int
    rank: int
    world_size: int
    save_id: str
    layouts: dict[str, TensorLayout]  # in the order of the bytes
    manifest: dict[str, Any]

    @property
    def payload_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(layout.local_bytes for layout in self.layouts.values())

    def encode(self) -> bytes:
        """As written to the file."""
        return json.dumps({**asdict(self), "layouts": {n: t.to_json() for n, t in self.layouts.items()}}).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Header":
        """What `encode` wrote; ValueError or KeyError for anything else."""
        value = json.loads(data)
        layouts = {name: TensorLayout.from_json(layout) for name, layout in value.pop("layouts").items()}
        return cls(**value, layouts=layouts)


def file_name(step: int, save_id: str, rank: int) -> str:
    """The name of a rank's file of one save.

    NVRx's name has no room for ten million steps, and a step that is saved again would overwrite the one before.
    """
    return f"step-{step:08d}.{save_id}.rank-{rank}"


def parse_name(name: str) -> tuple[int, str, int] | None:
    """Step, save and rank of a file with such a name; None for another name."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), match[2], int(match[3])) if match else None


def payload_order(layouts: dict[str, TensorLayout]) -> dict[str, TensorLayout]:
    """Widest elements first: each shard's offset is then a multiple of its element size, without padding."""
    return dict(sorted(layouts.items(), key=lambda item: (-item[1].torch_dtype.itemsize, item[0])))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as a row of bytes; a copy only if it is not contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def new_room(header: Header) -> list[torch.Tensor]:
    """Memory for the shards' bytes, a row for each, in one block."""
    sizes = [layout.local_bytes for layout in header.layouts.values()]
    return list(torch.empty(sum(sizes), dtype=torch.uint8).split(sizes)) if sizes else []


def shards_from(header: Header, rows: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The shards whose bytes are `rows`: the same memory."""
    return {
        name: row.view(layout.torch_dtype).reshape(layout.local_shape)
        for (name, layout), row in zip(header.layouts.items(), rows, strict=True)
    }


def payload_digest(rows: Iterable[torch.Tensor]) -> str:
    """Checksum of the bytes in `rows`, one after the other."""
    digest = xxhash.xxh3_128()
    for chunk in _chunks(rows, _READ_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def write(path: Path, header: Header, rows: Iterable[torch.Tensor]) -> tuple[int, str]:
    """Write a file beside `path` and rename it: at every instant `path` is whole or not there.

    Nothing is flushed to the device: what a power loss could take is lost with the node anyway.

    Returns the file's size and the checksum of the bytes that were written. Raises OSError; nothing is left then.
    """
    head = header.encode()
    digest = xxhash.xxh3_128()
    dirty = path.with_name(path.name + DIRTY)
    with dirty.open("xb", buffering=0) as file:
        try:
            _write_all(file, memoryview(_PREFIX.pack(_MAGIC, len(head), xxhash.xxh3_128_digest(head)) + head))
            for chunk in _chunks(rows, _WRITE_CHUNK):
                digest.update(chunk)
                _write_all(file, chunk)
            _write_all(file, memoryview(digest.digest()))
            size = file.tell()
            dirty.rename(path)
        except OSError:
            dirty.unlink(missing_ok=True)
            raise
    return size, digest.hexdigest()


def read_header(path: Path) -> Header:
    """The verified header of a file that has its full length. Raises LocalCheckpointError with file and reason."""
    with _reasons(path), path.open("rb", buffering=0) as file:
        return _read_header(file)


def read(path: Path, room: Callable[[Header], list[torch.Tensor]] = new_room) -> tuple[Header, list[torch.Tensor], str]:
    """Header, the shards' bytes and their checksum; verified. `room` gives the memory, a row for each shard.

    Raises LocalCheckpointError with file and reason; what the memory holds is then undefined.
    """
    with _reasons(path), path.open("rb", buffering=0) as file:
        header = _read_header(file)
        rows = room(header)
        return header, rows, _read_payload(file, _chunks(rows, _READ_CHUNK))


def verify(path: Path) -> Header:
    """Like `read`, but keeps nothing: needs no memory for the shards."""
    with _reasons(path), path.open("rb", buffering=0) as file:
        header = _read_header(file)
        view = memoryview(bytearray(_READ_CHUNK))
        sizes = (min(_READ_CHUNK, header.payload_bytes - at) for at in range(0, header.payload_bytes, _READ_CHUNK))
        _read_payload(file, (view[:size] for size in sizes))
        return header


def _read_payload(file: BinaryIO, chunks: Iterable[memoryview]) -> str:
    digest = xxhash.xxh3_128()
    for chunk in chunks:
        _read_into(file, chunk)
        digest.update(chunk)
    written = bytearray(_DIGEST_BYTES)
    _read_into(file, memoryview(written))
    if digest.digest() != bytes(written):
        raise ValueError("its bytes are not those that were written")
    return digest.hexdigest()


def _read_header(file: BinaryIO) -> Header:
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size or not prefix.startswith(_MAGIC):
        raise ValueError("it is no local checkpoint, or of another version")
    _, head_bytes, head_digest = _PREFIX.unpack(prefix)
    if head_bytes > size:
        raise ValueError(f"it is cut off at {size} bytes")
    head = bytearray(head_bytes)
    _read_into(file, memoryview(head))
    if xxhash.xxh3_128_digest(head) != head_digest:
        raise ValueError("its header is not the one that was written")
    header = Header.decode(bytes(head))
    expected = _PREFIX.size + head_bytes + header.payload_bytes + _DIGEST_BYTES
    if size != expected:
        raise ValueError(f"it has {size} bytes, {expected} were written")
    return header


@contextmanager
def _reasons(path: Path) -> Iterator[None]:
    """Turn what goes wrong with a file into one line with its name."""
    try:
        yield
    except OSError as error:
        raise LocalCheckpointError(f"{path} can't be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LocalCheckpointError(f"{path} is damaged: {error}") from error


def _chunks(rows: Iterable[torch.Tensor], size: int) -> Iterator[memoryview]:
    for row in rows:
        view = row.numpy().data
        for offset in range(0, len(view), size):
            yield view[offset : offset + size]


def _write_all(file: BinaryIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def _read_into(file: BinaryIO, data: memoryview) -> None:
    while data:
        count = file.readinto(data)  # pyright: ignore[reportAttributeAccessIssue]  a raw file has it
        if not count:
            raise ValueError("it ends too early")
        data = data[count:]
