"""Preparing a corpus: what is in it, and that it appears whole or not at all."""

import errno
import fcntl
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from training import prepare_data
from training.data import TokenizedCorpus
from training.prepare_data import prepare

ROOT = Path(__file__).parents[2]
END = 256


@pytest.fixture
def texts(tmp_path):
    files = {
        "b.py": b"second",
        "a/z.py": b"first\n",
        "empty.py": b"",
        "notes.txt": b"not python",
        "c/test/t.py": b"a test",
        "c/tests.py": bytes(range(256)),
    }
    for name, content in files.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(content)
    return tmp_path / "in"


def all_tokens(out):
    corpus = TokenizedCorpus(out)
    return corpus.tokens(0, corpus.index.total_tokens - 1).tolist()


def contents(directory):
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def left_beside(out):
    return sorted(path.name for path in out.parent.iterdir() if path.name != "in")


def run(*arguments, **options):
    command = [sys.executable, "-m", "training.prepare_data", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False, **options)


def test_files_are_joined_in_the_order_of_their_paths_with_an_end_after_each(texts, tmp_path):
    assert prepare(texts, "*.py", tmp_path / "out", exclude=["test"])

    expected = [*b"first\n", END, *b"second", END, *range(256), END]
    assert all_tokens(tmp_path / "out") == expected
    index = TokenizedCorpus(tmp_path / "out").index
    assert (index.tokenizer, index.vocab_size, index.dtype, index.end_of_document) == ("bytes", 257, "uint16", END)
    assert (index.documents, index.total_tokens) == (3, len(expected))


@pytest.mark.parametrize(
    ("pattern", "exclude", "documents"),
    [
        ("*", [], 5),
        ("*.py", [], 4),
        ("c/*", [], 2),
        ("*.py", ["test", "a"], 2),
        ("*.py", ["c/test/t.py"], 3),
        ("*.py", ["c/*"], 2),
        ("*.py", ["test*"], 2),
    ],
)
def test_patterns_choose_files(texts, tmp_path, pattern, exclude, documents):
    prepare(texts, pattern, tmp_path / "out", exclude=exclude)

    assert TokenizedCorpus(tmp_path / "out").index.documents == documents


@pytest.mark.parametrize(("shard_tokens", "sizes"), [(5, [5, 5, 4]), (7, [7, 7]), (14, [14]), (100, [14])])
def test_shards_hold_the_same_stream_whatever_their_size(texts, tmp_path, shard_tokens, sizes):
    out = tmp_path / "out"
    prepare(texts, "*.py", out, exclude=["c"], shard_tokens=shard_tokens)

    assert [shard.tokens for shard in TokenizedCorpus(out).index.shards] == sizes
    assert all_tokens(out) == [*b"first\n", END, *b"second", END]


def test_each_shard_has_its_checksum_and_little_endian_tokens(texts, tmp_path):
    out = tmp_path / "out"
    prepare(texts, "*.py", out, exclude=["c"], shard_tokens=9)

    for shard in TokenizedCorpus(out).index.shards:
        assert hashlib.sha256((out / shard.file).read_bytes()).hexdigest() == shard.sha256
    assert (out / "tokens-00000.bin").read_bytes()[:4] == b"f\0i\0"


def test_files_larger_than_one_read_stay_whole(tmp_path):
    content = np.random.default_rng(0).bytes((1 << 20) + 12_345)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "big").write_bytes(content)
    prepare(tmp_path / "in", "*", tmp_path / "out", shard_tokens=300_000)

    assert bytes(all_tokens(tmp_path / "out")[:-1]) == content


def test_two_runs_write_the_same_bytes(texts, tmp_path):
    for out in ("one", "two"):
        prepare(texts, "*.py", tmp_path / out, shard_tokens=50)

    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.parametrize(("max_bytes", "documents"), [(6, 1), (11, 1), (12, 2), (1000, 3)])
def test_a_size_limit_takes_the_first_whole_files(texts, tmp_path, max_bytes, documents):
    prepare(texts, "*.py", tmp_path / "out", exclude=["test"], max_bytes=max_bytes)

    assert TokenizedCorpus(tmp_path / "out").index.documents == documents


def test_a_finished_corpus_is_not_written_again(texts, tmp_path):
    out = tmp_path / "out"
    prepare(texts, "*.py", out)
    written = {file: file.stat().st_mtime_ns for file in out.iterdir()}

    assert not prepare(texts, "*.py", out)
    assert {file: file.stat().st_mtime_ns for file in out.iterdir()} == written


def test_a_finished_corpus_with_other_settings_is_kept_and_reported(texts, tmp_path):
    out = tmp_path / "out"
    prepare(texts, "*.py", out)
    before = contents(out)

    with pytest.raises(ValueError, match="with other max_bytes, shard_tokens; choose another --out or delete it"):
        prepare(texts, "*.py", out, shard_tokens=9, max_bytes=10_000)
    (texts / "b.py").write_bytes(b"changed")
    with pytest.raises(ValueError, match="with other input_files_sha256"):
        prepare(texts, "*.py", out)
    assert contents(out) == before


def test_a_damaged_corpus_is_not_called_prepared(texts, tmp_path):
    out = tmp_path / "out"
    prepare(texts, "*.py", out)
    data = bytearray((out / "tokens-00000.bin").read_bytes())
    data[3] ^= 1
    (out / "tokens-00000.bin").write_bytes(data)

    with pytest.raises(ValueError, match="damaged"):
        prepare(texts, "*.py", out)


def test_an_empty_directory_may_become_the_corpus(texts, tmp_path):
    (tmp_path / "out").mkdir()

    assert prepare(texts, "*.py", tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_dir": "none"}, "none: no such directory"),
        ({"pattern": "*.rs"}, r"no text in files that match '\*\.rs'; check --pattern and --exclude"),
        ({"exclude": ["*"]}, "no text in files"),
        ({"tokenizer": "/models/tokenizer.json"}, r"'/models/tokenizer\.json': only `bytes` is supported so far"),
        ({"shard_tokens": 0}, "shard_tokens 0 must be at least 1"),
        ({"max_bytes": 5}, "max_bytes 5: the first file, a/z.py, has 6; raise it"),
        ({"out": "in"}, "in: exists and is no corpus"),
        ({"out": "in/b.py"}, "b.py: exists and is no corpus"),
        ({"out": "in/b.py/out"}, "cannot be written"),
        ({"out": "/proc/out"}, "cannot be written"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(texts, tmp_path, changes, message):
    values = {"input_dir": "in", "pattern": "*.py", "out": "out", **changes}
    input_dir, out = tmp_path / values.pop("input_dir"), tmp_path / values.pop("out")

    with pytest.raises(ValueError, match=message) as error:
        prepare(input_dir, values.pop("pattern"), out, **values)

    assert "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_a_full_disk_is_one_line_and_leaves_nothing(texts, tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match="the disk is full; free space"):
        prepare(texts, "*.py", tmp_path / "out")

    assert left_beside(tmp_path / "out") == []


def test_a_write_that_fails_midway_exits_2_and_leaves_nothing(texts, tmp_path):
    (texts / "big.py").write_bytes(bytes(100_000))

    def limit_file_size():
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    result = run("--input", texts, "--out", tmp_path / "out", preexec_fn=limit_file_size)

    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        f"prepare_data: out {tmp_path / 'out'}: cannot be written (File too large); choose another --out"
    ]
    assert left_beside(tmp_path / "out") == []


def test_a_file_that_changes_while_it_is_read_is_an_error(texts, tmp_path, monkeypatch):
    listed = prepare_data._list_documents

    def list_then_change(*arguments):
        documents = listed(*arguments)
        (texts / "b.py").write_bytes(b"longer than before")
        return documents

    monkeypatch.setattr(prepare_data, "_list_documents", list_then_change)
    with pytest.raises(ValueError, match="b.py: changed while it was read"):
        prepare(texts, "*.py", tmp_path / "out")
    assert left_beside(tmp_path / "out") == []


# Stop the process dead when it enters `os.fsync` for the given time (3: two shards, then the index).
KILLED = """
import os, signal, sys
from pathlib import Path
from training import prepare_data
left, fsync = int(sys.argv[3]), os.fsync
def fsync_or_die(file):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(file)
os.fsync = fsync_or_die
prepare_data.prepare(Path(sys.argv[1]), "*.py", Path(sys.argv[2]), exclude=["c"], shard_tokens=9)
"""


@pytest.mark.parametrize("sync", [1, 2, 3])
def test_a_killed_preparation_leaves_no_corpus_and_the_next_one_clears_up(texts, tmp_path, sync):
    out = tmp_path / "out"
    command = [sys.executable, "-c", KILLED, str(texts), str(out), str(sync)]
    assert subprocess.run(command, cwd=ROOT, timeout=60, check=False).returncode == -signal.SIGKILL

    assert left_beside(out) == [".out.partial"]
    # Dead after the index was written, the hidden directory is a whole corpus that lacks only its name.
    for path in (out, tmp_path / ".out.partial") if sync < 3 else (out,):
        with pytest.raises(ValueError, match="prepare"):
            TokenizedCorpus(path)

    assert prepare(texts, "*.py", out, exclude=["c"], shard_tokens=9)
    assert left_beside(out) == ["out"]
    TokenizedCorpus(out).verify_checksums()
    assert sorted(contents(out)) == ["index.json", "tokens-00000.bin", "tokens-00001.bin"]


def test_two_preparations_at_once_do_not_touch_each_other(texts, tmp_path):
    partial = tmp_path / ".out.partial"
    partial.mkdir()
    (partial / "tokens-00000.bin").write_bytes(b"being written")
    other = os.open(partial, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    try:
        with pytest.raises(ValueError, match="another process is preparing it"):
            prepare(texts, "*.py", tmp_path / "out")
        assert contents(partial) == {"tokens-00000.bin": b"being written"}
    finally:
        os.close(other)


def test_the_command_prepares_then_says_that_it_has(texts, tmp_path):
    out = tmp_path / "data" / "out"
    arguments = ["--input", texts, "--pattern", "*.py", "--exclude", "test", "c/*", "--shard-tokens", 9, "--out", out]

    first, second = run(*arguments), run(*arguments)

    assert (first.returncode, second.returncode) == (0, 0)
    assert first.stdout == f"{out}: prepared, 2 documents, 14 tokens, 2 shards\n"
    assert second.stdout == f"{out}: already prepared, 2 documents, 14 tokens, 2 shards\n"
    assert first.stderr == second.stderr == ""
    assert json.loads((out / "index.json").read_text())["settings"]["exclude"] == ["c/*", "test"]


def test_progress_is_shown_to_a_person_only(texts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    prepare(texts, "*.py", tmp_path / "watched")
    assert "tokenizing" in capsys.readouterr().err

    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    prepare(texts, "*.py", tmp_path / "unwatched")
    assert capsys.readouterr().err == ""
