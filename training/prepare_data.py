"""Tokenizes the text files of a directory into a corpus: python -m training.prepare_data --input DIR --out DIR.

The same files and settings give the same bytes. The corpus appears at its path in one rename, complete or not at all.
"""

import argparse
import errno
import fcntl
import fnmatch
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from training.config import EXIT_BAD_CONFIG, EXIT_OK
from training.data import INDEX_FILE, CorpusIndex, ShardEntry, TokenizedCorpus

BYTES_VOCAB_SIZE = 257
BYTES_END_OF_DOCUMENT = 256
DEFAULT_SHARD_TOKENS = 1 << 28  # 512 MiB of uint16
_TOKEN_DTYPE = np.dtype("<u2")
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Document:
    """A file to tokenize: its path below the input directory, with "/", and its size when it was listed."""

    relative_path: str
    size_bytes: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code: 0, or 2 with one line on stderr for what the user can mend."""
    options = _parser().parse_args(arguments)
    try:
        wrote = prepare(
            options.input,
            options.pattern,
            options.out,
            tokenizer=options.tokenizer,
            exclude=options.exclude,
            shard_tokens=options.shard_tokens,
            max_bytes=options.max_bytes,
        )
    except ValueError as error:
        print(f"prepare_data: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    except KeyboardInterrupt:
        print("prepare_data: interrupted, nothing was written", file=sys.stderr)
        return 130
    index = TokenizedCorpus(options.out).index
    counts = f"{index.documents} documents, {index.total_tokens} tokens, {len(index.shards)} shards"
    print(f"{options.out}: {'prepared' if wrote else 'already prepared'}, {counts}")
    return EXIT_OK


def prepare(
    input_dir: Path,
    pattern: str,
    out: Path,
    *,
    tokenizer: str = "bytes",
    exclude: Sequence[str] = (),
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    max_bytes: int | None = None,
) -> bool:
    """Write the corpus `out` from the files below `input_dir`, in the order of their paths.

    `pattern` and `exclude` are shell patterns. `pattern` is matched with a file's relative path ("*" also matches
    "/"); a pattern of `exclude` leaves out what it matches as a relative path or as any one part of it. Symbolic
    links to directories are not followed, empty files are left out. `max_bytes` takes only the first files that
    together are no larger.

    Returns:
        True when it wrote, False when `out` already is this very corpus.

    Raises:
        ValueError: no such input, nothing matches, `out` is something else or can't be written, or the disk is full.
        Nothing is left behind then.
    """
    if tokenizer != "bytes":
        raise ValueError(f"tokenizer {tokenizer!r}: only `bytes` is supported so far; pass --tokenizer bytes")
    if shard_tokens < 1:
        raise ValueError(f"shard_tokens {shard_tokens} must be at least 1")
    documents = _within(max_bytes, _list_documents(input_dir, pattern, exclude))
    settings = {
        "pattern": pattern,
        "exclude": sorted(exclude),
        "shard_tokens": shard_tokens,
        "max_bytes": max_bytes,
        "input_files_sha256": _fingerprint(documents),
    }
    if _already_prepared(out, tokenizer, settings):
        return False
    with _appearing_at(out) as partial:
        writer = _ShardWriter(partial, shard_tokens)
        with writer:
            _write_documents(writer, input_dir, documents)
        index = CorpusIndex(
            tokenizer=tokenizer,
            vocab_size=BYTES_VOCAB_SIZE,
            dtype="uint16",
            end_of_document=BYTES_END_OF_DOCUMENT,
            documents=len(documents),
            total_tokens=sum(shard.tokens for shard in writer.shards),
            settings=settings,
            shards=tuple(writer.shards),
        )
        _write_durably(partial / INDEX_FILE, (index.model_dump_json(indent=1) + "\n").encode())
    return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training.prepare_data", description="Tokenize the text files of a directory into a corpus."
    )
    parser.add_argument("--input", type=Path, required=True, metavar="DIR", help="directory of text files")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the corpus, as in data.path")
    parser.add_argument("--pattern", default="*", help="shell pattern of relative paths to take (default: %(default)s)")
    parser.add_argument(
        "--exclude", nargs="+", default=[], metavar="PATTERN", help="relative paths, or parts of them, to leave out"
    )
    parser.add_argument("--tokenizer", default="bytes", help="only `bytes` so far: token = byte value, 256 ends a file")
    parser.add_argument("--shard-tokens", type=int, default=DEFAULT_SHARD_TOKENS, metavar="N", help="tokens per shard")
    parser.add_argument("--max-bytes", type=int, metavar="N", help="take only the first files, up to this many bytes")
    return parser


def _list_documents(input_dir: Path, pattern: str, exclude: Sequence[str]) -> list[Document]:
    if not input_dir.is_dir():
        raise ValueError(f"input {input_dir}: no such directory; pass --input an existing one")
    try:
        documents = sorted(_walk(input_dir, pattern, exclude), key=lambda document: document.relative_path)
    except OSError as error:
        raise ValueError(f"{error.filename}: cannot be read ({error.strerror}); fix it or pass --exclude") from error
    if not documents:
        raise ValueError(f"input {input_dir}: no text in files that match {pattern!r}; check --pattern and --exclude")
    return documents


def _walk(input_dir: Path, pattern: str, exclude: Sequence[str]) -> Iterator[Document]:
    def left_out(relative: Path) -> bool:
        # Directories above were asked already, so the name is the only part that is new.
        candidates = (relative.as_posix(), relative.name)
        return any(fnmatch.fnmatchcase(candidate, each) for each in exclude for candidate in candidates)

    def stop(error: OSError) -> None:
        raise error

    for directory, subdirectories, files in os.walk(input_dir, onerror=stop):
        below = Path(directory).relative_to(input_dir)
        subdirectories[:] = [name for name in subdirectories if not left_out(below / name)]
        for name in files:
            relative = below / name
            if not fnmatch.fnmatchcase(relative.as_posix(), pattern) or left_out(relative):
                continue
            # Not a pipe, a socket or a link to nothing: reading one could block or fail.
            if (input_dir / relative).is_file() and (size := (input_dir / relative).stat().st_size):
                yield Document(relative.as_posix(), size)


def _within(max_bytes: int | None, documents: list[Document]) -> list[Document]:
    if max_bytes is None:
        return documents
    total, chosen = 0, []
    for document in documents:
        total += document.size_bytes
        if total > max_bytes:
            break
        chosen.append(document)
    if not chosen:
        first = documents[0]
        raise ValueError(
            f"max_bytes {max_bytes}: the first file, {first.relative_path}, has {first.size_bytes}; raise it"
        )
    return chosen


def _fingerprint(documents: list[Document]) -> str:
    """Names and sizes, so that a finished corpus recognizes its input without reading it all again."""
    lines = (os.fsencode(f"{document.size_bytes} {document.relative_path}\n") for document in documents)
    return hashlib.sha256(b"".join(lines)).hexdigest()


def _already_prepared(out: Path, tokenizer: str, settings: dict[str, object]) -> bool:
    try:
        if not out.exists() or (out.is_dir() and not any(out.iterdir())):
            return False
    except OSError as error:
        raise _unwritable(out, error) from error
    if not (out / INDEX_FILE).exists():
        raise ValueError(f"out {out}: exists and is no corpus; choose another --out")
    corpus = TokenizedCorpus(out)
    found = {"tokenizer": corpus.index.tokenizer, **corpus.index.settings}
    wanted = {"tokenizer": tokenizer, **settings}
    different = sorted(key for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key))
    if different:
        raise ValueError(
            f"out {out}: holds a corpus with other {', '.join(different)}; choose another --out or delete it"
        )
    corpus.verify_checksums()
    return True


@contextmanager
def _appearing_at(out: Path) -> Iterator[Path]:
    """A directory to fill that becomes `out` in one rename, or vanishes if the block raises.

    A process that was killed leaves it behind under a hidden name, and the next one takes it away: the lock tells
    its remains from another process at work, since the kernel drops a lock together with its process.
    """
    partial = out.with_name(f".{out.name}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = os.open(partial, os.O_RDONLY)
    except OSError as error:
        raise _unwritable(out, error) from error
    try:
        _lock(lock, out)
        try:
            _empty(partial)
            yield partial
            partial.rename(out)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        raise _unwritable(out, error) from error
    finally:
        os.close(lock)


def _lock(directory: int, out: Path) -> None:
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"out {out}: another process is preparing it; wait for that one") from error


def _empty(directory: Path) -> None:
    for file in directory.iterdir():
        file.unlink()


def _unwritable(out: Path, error: OSError) -> ValueError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ValueError(f"out {out}: the disk is full; free space, choose another --out or pass --max-bytes")
    return ValueError(f"out {out}: cannot be written ({error.strerror}); choose another --out")


def _write_documents(writer: "_ShardWriter", input_dir: Path, documents: list[Document]) -> None:
    progress = _Progress(sum(document.size_bytes for document in documents))
    for document in documents:
        for block in _read_blocks(input_dir, document):
            writer.append(np.frombuffer(block, dtype=np.uint8).astype(_TOKEN_DTYPE))
            progress.advance(len(block))
        writer.append(np.array([BYTES_END_OF_DOCUMENT], dtype=_TOKEN_DTYPE))
    progress.close()


def _read_blocks(input_dir: Path, document: Document) -> Iterator[bytes]:
    path = input_dir / document.relative_path
    left = document.size_bytes
    try:
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                left -= len(block)
                yield block
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); fix it or pass --exclude") from error
    if left:
        raise ValueError(f"{path}: changed while it was read; run again when nothing writes to the input")


class _ShardWriter:
    """Cuts a stream of tokens into files of `shard_tokens`; `shards` describes those that are complete."""

    def __init__(self, directory: Path, shard_tokens: int) -> None:
        self.shards: list[ShardEntry] = []
        self._directory = directory
        self._shard_tokens = shard_tokens
        self._tokens = 0
        self._open_next()

    def __enter__(self) -> "_ShardWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish() if kind is None else self._file.close()

    def append(self, tokens: np.ndarray) -> None:
        """Write `tokens` [n], going on in the next file whenever one is full."""
        while len(tokens):
            if self._tokens == self._shard_tokens:
                self._finish()
                self._open_next()
            data = tokens[: self._shard_tokens - self._tokens]
            self._file.write(data.data)
            self._sha256.update(data.data)
            self._tokens += len(data)
            tokens = tokens[len(data) :]

    def _open_next(self) -> None:
        self._name = f"tokens-{len(self.shards):05d}.bin"
        self._file = (self._directory / self._name).open("xb")
        self._sha256 = hashlib.sha256()
        self._tokens = 0

    def _finish(self) -> None:
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        self.shards.append(ShardEntry(file=self._name, tokens=self._tokens, sha256=self._sha256.hexdigest()))


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # or a power cut after the rename could show an empty index


class _Progress:
    """Percent done on stderr, a few times a second, if a person is watching."""

    def __init__(self, total_bytes: int) -> None:
        self._total = total_bytes
        self._done = 0
        self._shown = 0.0
        self._visible = sys.stderr.isatty()

    def advance(self, size_bytes: int) -> None:
        self._done += size_bytes
        if self._visible and time.monotonic() - self._shown > 0.2:
            self._shown = time.monotonic()
            share = self._done / self._total
            print(f"\rtokenizing {share:4.0%} of {self._total / 2**20:.0f} MiB", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._visible:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
