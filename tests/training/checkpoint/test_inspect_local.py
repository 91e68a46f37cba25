"""The list of local checkpoints that a person sees, against what the tier itself would restore."""

import os
import shutil
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from training.checkpoint.inspect_local import describe, describe_steps
from training.checkpoint.layout import tensor_layout
from training.checkpoint.local import LocalTier


def saved(rank: int, root: Path, replicas: int, shared: bool) -> int:
    tier = LocalTier(
        directory=root / ("node" if shared else f"node-{rank}"),
        session="run",
        rank=rank,
        world_size=2,
        ranks_per_node=1,
        replicas=replicas,
        timeout=timedelta(seconds=20),
    )
    tensor = torch.full((1000,), float(rank))
    return tier.save(step=40, tensors={"w": tensor}, layouts={"w": tensor_layout(tensor)}, manifest={})


def test_each_file_is_listed_with_its_place_step_size_and_age(run_ranks, tmp_path):
    written = run_ranks(saved, tmp_path, 1, False)
    entries = describe(tmp_path / "node-0")
    assert [(e.session, e.holder, e.rank, e.step, e.is_copy, e.problem) for e in entries] == [
        ("run", 0, 0, 40, False, None),
        ("run", 0, 1, 40, True, None),
    ]
    assert sum(entry.size_bytes for entry in entries) == written[0]
    os.utime(entries[0].path, (entries[0].path.stat().st_atime, entries[0].path.stat().st_mtime - 3600))
    assert 3600 <= describe(tmp_path / "node-0")[0].age_seconds < 4000
    (step,) = describe_steps(tmp_path / "node-0")
    assert (step.session, step.step, step.size_bytes, step.problem) == ("run", 40, written[0], None)
    assert step.age_seconds < 600


def test_a_save_is_complete_only_with_every_ranks_shards(run_ranks, tmp_path):
    run_ranks(saved, tmp_path, 0, False)
    (step,) = describe_steps(tmp_path / "node-0")  # the other half is on the other node
    assert step.problem == "no good file here of rank 1 of 2"
    shutil.copytree(tmp_path / "node-1", tmp_path / "node-0", dirs_exist_ok=True)
    assert describe_steps(tmp_path / "node-0")[0].problem is None


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def half_written(path: Path) -> None:
    path.rename(path.with_name(path.name + ".dirty"))


def swapped(path: Path) -> None:
    path.rename(path.with_name(path.name.replace("rank-0", "rank-1")))


@pytest.mark.parametrize(("damage", "reason"), [(cut, "bytes"), (half_written, "cut off"), (swapped, "rank 0, not")])
def test_a_file_that_is_no_good_says_why(run_ranks, tmp_path, damage, reason):
    run_ranks(saved, tmp_path, 0, True)
    damage(describe(tmp_path / "node")[0].path)
    problems = [entry.problem for entry in describe(tmp_path / "node") if entry.problem]
    assert len(problems) == 1
    assert reason in problems[0]
    (step,) = describe_steps(tmp_path / "node")
    assert "rank 0 of 2" in step.problem


def test_flipped_bits_are_found_by_verify_and_a_good_copy_makes_up_for_them(run_ranks, tmp_path):
    run_ranks(saved, tmp_path, 1, True)
    own, copy = (entry.path for entry in describe(tmp_path / "node") if entry.rank == 0)
    for path, complete in ((own, True), (copy, False)):
        data = bytearray(path.read_bytes())
        data[-500] ^= 1
        path.write_bytes(data)
        assert all(entry.problem is None for entry in describe(tmp_path / "node"))
        problems = [entry.problem for entry in describe(tmp_path / "node", verify=True) if entry.problem]
        assert str(path) in "".join(problems)
        (step,) = describe_steps(tmp_path / "node", verify=True)
        assert (step.problem is None) is complete


def test_other_files_and_no_directory_are_no_checkpoints(tmp_path):
    (tmp_path / "run" / "0").mkdir(parents=True)
    (tmp_path / "run" / "0" / "step-1.rank-0").write_text("a person's")
    (tmp_path / "run" / "0" / "notes.txt").write_text("a person's")
    assert describe(tmp_path) == []
    assert describe_steps(tmp_path / "nowhere") == []
