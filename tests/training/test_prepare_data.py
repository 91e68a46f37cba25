"""Tokenizing a corpus: complete or absent, the same every time."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from training.prepare_data import END_OF_DOCUMENT, prepare

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def source(tmp_path) -> Path:
    folder = tmp_path / "text"
    for name, text in (("b.py", "two"), ("a/x.py", "one"), ("a/tests/t.py", "left out"), ("notes.md", "not python")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "training.prepare_data", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )


def test_documents_come_in_the_order_of_their_paths_each_with_its_end(source, tmp_path):
    assert prepare(source, "*.py", tmp_path / "out", exclude=("tests",))
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    tokens = np.fromfile(tmp_path / "out" / "shard-00000.bin", dtype=index["dtype"])
    assert tokens.tolist() == [*b"one", END_OF_DOCUMENT, *b"two", END_OF_DOCUMENT]
    assert (index["documents"], index["tokens"], index["vocab_size"]) == (2, 8, 257)


def test_shards_are_full_but_the_last_and_carry_their_checksum(source, tmp_path):
    prepare(source, "*.py", tmp_path / "out", shard_tokens=5)
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert [shard["tokens"] for shard in index["shards"]] == [5, 5, 5, 2]
    for shard in index["shards"]:
        assert hashlib.sha256((tmp_path / "out" / shard["file"]).read_bytes()).hexdigest() == shard["sha256"]


def test_a_limit_stops_before_the_document_that_exceeds_it(source, tmp_path):
    prepare(source, "*.py", tmp_path / "out", exclude=("tests",), max_bytes=5)
    assert json.loads((tmp_path / "out" / "index.json").read_text())["documents"] == 1


def test_two_preparations_are_equal_byte_for_byte(source, tmp_path):
    for name in ("one", "two"):
        prepare(source, "*.py", tmp_path / name, shard_tokens=6)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "two").iterdir())
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_corpus_that_is_there_is_left_alone_and_another_one_is_not_overwritten(source, tmp_path):
    assert prepare(source, "*.py", tmp_path / "out")
    assert not prepare(source, "*.py", tmp_path / "out")
    with pytest.raises(ValueError, match="made with other settings; remove it"):
        prepare(source, "*.md", tmp_path / "out")


def test_a_preparation_that_is_killed_leaves_nothing_and_the_next_one_succeeds(tmp_path):
    source = tmp_path / "text"
    source.mkdir()
    for number in range(3000):
        (source / f"{number}.txt").write_text("x" * 2000)
    arguments = ["--input", str(source), "--out", str(tmp_path / "out"), "--shard-tokens", "5000"]
    process = subprocess.Popen([sys.executable, "-m", "training.prepare_data", *arguments], cwd=REPOSITORY)
    partial = tmp_path / ".out.partial"
    deadline = time.monotonic() + 30
    while not list(partial.glob("shard-0000*")) and time.monotonic() < deadline:
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(timeout=30) == -signal.SIGKILL, "it was done before it could be killed"
    assert not (tmp_path / "out").exists()
    assert cli(*arguments).returncode == 0
    assert not partial.exists()


def test_mistakes_give_one_line_and_exit_code_2(source, tmp_path):
    (tmp_path / "file").touch()
    for arguments, message in (
        (["--input", str(tmp_path / "none"), "--out", str(tmp_path / "o")], "no such folder"),
        (["--input", str(source), "--pattern", "*.rs", "--out", str(tmp_path / "o")], "no file matches *.rs"),
        (["--input", str(source), "--out", str(tmp_path / "file" / "o"), "--pattern", "*.py"], "cannot be written"),
        (["--input", str(source), "--out", str(tmp_path / "o"), "--tokenizer", "t.json"], "only `bytes` is known"),
    ):
        finished = cli(*arguments)
        assert finished.returncode == 2
        assert len(finished.stderr.strip().splitlines()) == 1
        assert message in finished.stderr
    assert not (tmp_path / "o").exists()
