"""The command line over real files: a table, every byte verified, and what it says of damage."""

import json
import subprocess
import sys

import pytest

from tests.training.checkpoint.test_durable import make_checkpoint
from training import checkpoints
from training.checkpoint import durable


def test_list_shows_each_checkpoint_with_step_size_and_validity(tmp_path, capsys):
    make_checkpoint(tmp_path, 10)
    make_checkpoint(tmp_path, 20)
    assert checkpoints.main(["list", str(tmp_path)]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["tier", "step", "size", "age", "valid"]
    assert [row.split()[:2] for row in rows] == [["durable", "10"], ["durable", "20"]]
    assert all(row.endswith("yes") for row in rows)


def test_list_sees_sizes_and_verify_sees_every_byte(tmp_path, capsys):
    path = make_checkpoint(tmp_path, 10)
    content = bytearray((path / "__0_0.distcp").read_bytes())
    content[7] ^= 1
    (path / "__0_0.distcp").write_bytes(content)
    assert checkpoints.main(["list", str(tmp_path)]) == 0
    assert checkpoints.main(["verify", str(tmp_path)]) == 1
    assert "__0_0.distcp is damaged: its checksum" in capsys.readouterr().out
    (path / "__0_0.distcp").write_bytes(content[:-1])
    assert checkpoints.main(["list", str(tmp_path)]) == 1


def test_json_has_one_object_per_checkpoint_those_set_aside_among_them(tmp_path, capsys):
    make_checkpoint(tmp_path, 10)
    make_checkpoint(tmp_path, 20)
    durable.set_aside(tmp_path, 20)
    assert checkpoints.main(["list", "--json", str(tmp_path)]) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["tier"], row["step"], row["problem"]) for row in rows] == [
        ("durable", 10, None),
        ("durable", 20, "set aside: it was damaged"),
    ]


def test_show_prints_the_newest_manifest_or_the_one_asked_for(tmp_path, capsys):
    make_checkpoint(tmp_path, 10)
    make_checkpoint(tmp_path, 20)
    checkpoints.main(["show", str(tmp_path)])
    assert json.loads(capsys.readouterr().out)["step"] == 20
    checkpoints.main(["show", "--step", "10", str(tmp_path)])
    assert json.loads(capsys.readouterr().out)["step"] == 10
    assert checkpoints.main(["show", "--step", "15", str(tmp_path)]) == 1
    assert "no checkpoint of step 15; it has: 10, 20" in capsys.readouterr().err


def test_prune_deletes_the_old_and_says_which(tmp_path, capsys):
    for step in (10, 20, 30):
        make_checkpoint(tmp_path, step)
    assert checkpoints.main(["prune", "--keep-latest", "1", "--keep-every-steps", "20", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "deleted 1: 10\n"
    assert durable.committed_steps(tmp_path) == [20, 30]


@pytest.mark.parametrize("number", ["0", "-1", "many"])
def test_prune_never_keeps_nothing(tmp_path, number):
    with pytest.raises(SystemExit):
        checkpoints.main(["prune", "--keep-latest", number, str(tmp_path)])


def test_the_command_names_a_directory_that_is_not_there(tmp_path):
    command = [sys.executable, "-m", "training.checkpoints", "list", str(tmp_path / "nowhere")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        f"error: {tmp_path / 'nowhere'} is no directory; give a run's checkpoint.directory or "
        "checkpoint.local.directory\n"
    )
