"""Tokenize a corpus into memory-mapped shards: `python -m training.prepare_data --input DIR --out DIR`.

Byte-level: a token is a byte of the text, 256 ends a document. The result is complete or absent: it is written
beside its place and renamed into it.
"""

import argparse
import errno
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from training.config import EXIT_BAD_CONFIG
from training.data import FORMAT_VERSION, INDEX, read_index

END_OF_DOCUMENT = 256
VOCAB_SIZE = 257
_DTYPE = "uint16"
DEFAULT_SHARD_TOKENS = 100_000_000


def prepare(
    source: Path,
    pattern: str,
    out: Path,
    *,
    tokenizer: str = "bytes",
    exclude: tuple[str, ...] = (),
    max_bytes: int | None = None,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
) -> bool:
    """Tokenize the files under `source` that match `pattern` into `out`; False if it was there already.

    Files are taken in the order of their paths, leaving out those with a folder named in `exclude`, until
    `max_bytes` is reached.

    Raises:
        ValueError: nothing to tokenize, `out` cannot be written or holds another corpus, unknown tokenizer.
    """
    if tokenizer != "bytes":
        raise ValueError(f"--tokenizer {tokenizer}: only `bytes` is known so far")
    settings = {
        "tokenizer": tokenizer,
        "pattern": pattern,
        "exclude": sorted(exclude),
        "max_bytes": max_bytes,
        "shard_tokens": shard_tokens,
    }
    if out.exists() and any(out.iterdir()):
        if read_index(out)["settings"] == settings:
            return False
        raise ValueError(f"--out {out} holds a corpus made with other settings; remove it or choose another folder")
    documents = _documents(source, pattern, exclude)
    if not documents:
        raise ValueError(f"--input {source}: no file matches {pattern}; check --input, --pattern and --exclude")
    _write_or_nothing(documents, out, settings)
    return True


def _documents(source: Path, pattern: str, exclude: tuple[str, ...]) -> list[Path]:
    if not source.is_dir():
        raise ValueError(f"--input {source}: no such folder; name the one that holds the text files")
    left_out = set(exclude)
    matches = (path for path in source.rglob(pattern) if path.is_file())
    return sorted(path for path in matches if not left_out & set(path.relative_to(source).parts[:-1]))


def _write_or_nothing(documents: list[Path], out: Path, settings: dict[str, Any]) -> None:
    partial = out.with_name(f".{out.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        index = _write_shards(documents, partial, settings)
        (partial / INDEX).write_text(json.dumps(index, indent=1) + "\n")
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except OSError as error:
        fix = "free some space" if error.errno == errno.ENOSPC else "choose a folder that you may write"
        raise ValueError(f"--out {out}: cannot be written ({error.strerror}); {fix}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_shards(documents: list[Path], folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    shards: list[dict[str, Any]] = []
    pending: list[np.ndarray] = []
    count = pending_tokens = 0
    for tokens in _tokenized(documents, settings["max_bytes"]):
        count += 1
        pending.append(tokens)
        pending_tokens += len(tokens)
        if pending_tokens >= settings["shard_tokens"]:
            pending = _write_full_shards(folder, shards, np.concatenate(pending), settings["shard_tokens"])
            pending_tokens = sum(map(len, pending))
    if pending:
        shards.append(_write_shard(folder, len(shards), np.concatenate(pending)))
    return {
        "format_version": FORMAT_VERSION,
        "settings": settings,
        "vocab_size": VOCAB_SIZE,
        "dtype": _DTYPE,
        "documents": count,
        "tokens": sum(shard["tokens"] for shard in shards),
        "shards": shards,
    }


def _write_full_shards(
    folder: Path, shards: list[dict[str, Any]], tokens: np.ndarray, shard_tokens: int
) -> list[np.ndarray]:
    """Write whole shards; returns what is left over."""
    while len(tokens) >= shard_tokens:
        shards.append(_write_shard(folder, len(shards), tokens[:shard_tokens]))
        tokens = tokens[shard_tokens:]
    return [tokens] if len(tokens) else []


def _tokenized(documents: list[Path], max_bytes: int | None) -> Iterator[np.ndarray]:
    """Tokens of one document after the other, until `max_bytes` of text."""
    total = 0
    for number, path in enumerate(documents, start=1):
        text = path.read_bytes()
        if max_bytes is not None and total + len(text) > max_bytes:
            return
        total += len(text)
        _progress(number, len(documents), total)
        yield np.append(np.frombuffer(text, dtype=np.uint8).astype(_DTYPE), np.array([END_OF_DOCUMENT], dtype=_DTYPE))


def _write_shard(folder: Path, number: int, tokens: np.ndarray) -> dict[str, Any]:
    name, data = f"shard-{number:05d}.bin", tokens.tobytes()
    with (folder / name).open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"file": name, "tokens": len(tokens), "sha256": hashlib.sha256(data).hexdigest()}


def _progress(number: int, of: int, total: int) -> None:
    if sys.stderr.isatty():
        end = "\n" if number == of else ""
        print(f"\r{number}/{of} files, {total / 1e6:.1f} MB", end=end, file=sys.stderr, flush=True)


def main() -> int:
    """Command line; returns 0, or 2 for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m training.prepare_data", description="tokenize text into shards")
    parser.add_argument("--input", type=Path, required=True, help="folder with the text files")
    parser.add_argument("--pattern", default="*.txt", help="which files, e.g. '*.py' (default '*.txt')")
    parser.add_argument("--out", type=Path, required=True, help="folder for index.json and the shards")
    parser.add_argument("--tokenizer", default="bytes", help="`bytes`: a token is a byte (default)")
    parser.add_argument("--exclude", action="append", default=[], metavar="FOLDER", help="leave out folders so named")
    parser.add_argument("--max-bytes", type=int, help="stop before the document that exceeds this much text")
    parser.add_argument("--shard-tokens", type=int, default=DEFAULT_SHARD_TOKENS, help="tokens per shard")
    arguments = parser.parse_args()
    try:
        made = prepare(
            arguments.input,
            arguments.pattern,
            arguments.out,
            tokenizer=arguments.tokenizer,
            exclude=tuple(arguments.exclude),
            max_bytes=arguments.max_bytes,
            shard_tokens=arguments.shard_tokens,
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    index = read_index(arguments.out)
    print(
        f"{arguments.out}: {index['tokens']} tokens of {index['documents']} documents{'' if made else ' (was there)'}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
