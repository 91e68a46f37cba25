"""The durable tier's files: what counts as a checkpoint, what is kept, and what is found wrong with it."""

import json
from pathlib import Path

import pytest

from training.checkpoint import durable
from training.checkpoint.writer import sum_file


def make_checkpoint(directory: Path, step: int) -> Path:
    """A committed checkpoint with two data files, as `commit` leaves it."""
    path = durable.checkpoint_path(directory, step)
    path.mkdir(parents=True)
    for name, content in (("__0_0.distcp", b"zero" * 1000), ("__1_0.distcp", b"one" * 1000), (".metadata", b"meta")):
        (path / name).write_bytes(content)
    files = {file.name: vars(sum_file(file)) for file in path.iterdir()}
    (path / durable.MANIFEST).write_text(json.dumps({"step": step, "files": files}))
    return path


def test_a_directory_without_manifest_or_metadata_is_no_checkpoint(tmp_path):
    for name, files in (("step-00000001", ["manifest.json"]), ("step-00000002", [".metadata"]), ("step-00000003", [])):
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).touch()
    assert durable.committed_steps(tmp_path) == []


def test_a_copy_of_a_checkpoint_beside_it_does_not_matter(tmp_path):
    make_checkpoint(tmp_path, 4)
    for name in ("step-00000008.bak", "step-8", "damaged-step-00000012"):
        (tmp_path / name).mkdir()
        for file in ("manifest.json", ".metadata"):
            (tmp_path / name / file).touch()
    assert durable.committed_steps(tmp_path) == [4]


@pytest.mark.parametrize(
    ("keep_latest", "keep_every_steps", "left"),
    [(1, None, [60]), (3, None, [40, 50, 60]), (1, 20, [20, 40, 60]), (2, 30, [30, 50, 60]), (9, None, None)],
)
def test_pruning_keeps_the_newest_and_the_milestones(tmp_path, keep_latest, keep_every_steps, left):
    steps = [10, 20, 30, 40, 50, 60]
    for step in steps:
        make_checkpoint(tmp_path, step)
    deleted = durable.prune(tmp_path, keep_latest=keep_latest, keep_every_steps=keep_every_steps)
    assert durable.committed_steps(tmp_path) == (left or steps)
    assert deleted == [step for step in steps if step not in (left or steps)]
    assert not list(tmp_path.glob(".deleting-*"))


def test_an_undamaged_checkpoint_has_nothing_wrong_with_it(tmp_path):
    path = make_checkpoint(tmp_path, 1)
    manifest = durable.read_manifest(path)
    assert durable.damage(path, manifest) == []
    assert durable.foreign_files(path, manifest) == []


def test_truncated_flipped_missing_and_foreign_files_are_named(tmp_path):
    path = make_checkpoint(tmp_path, 1)
    manifest = durable.read_manifest(path)
    first, second = path / "__0_0.distcp", path / "__1_0.distcp"
    content = bytearray(first.read_bytes())
    content[1234] ^= 1
    first.write_bytes(content)
    second.write_bytes(second.read_bytes()[:-1])
    (path / "__2_0.distcp").touch()
    assert durable.damage(path, manifest) == [
        f"{first} is damaged: its checksum is not the one that was written",
        f"{second} is damaged: it has 2999 bytes, 3000 were written",
    ]
    assert durable.damage(path, manifest, ["__1_0.distcp"]) == [
        f"{second} is damaged: it has 2999 bytes, 3000 were written"
    ]
    second.unlink()
    assert f"{second} is missing" in durable.damage(path, manifest)
    assert durable.foreign_files(path, manifest) == [f"{path / '__2_0.distcp'} does not belong to the checkpoint"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"files": {}}', b'{"files": {".metadata": 7}}'])
def test_a_damaged_manifest_is_named(tmp_path, content):
    path = make_checkpoint(tmp_path, 1)
    (path / durable.MANIFEST).write_bytes(content)
    with pytest.raises(durable.DamagedCheckpointError, match="manifest.json is damaged"):
        durable.read_manifest(path)


def test_damaged_metadata_is_found_before_it_is_unpickled(tmp_path):
    path = make_checkpoint(tmp_path, 1)
    (path / ".metadata").write_bytes(b"atem")
    with pytest.raises(durable.DamagedCheckpointError, match=r"\.metadata is damaged: its checksum"):
        durable.read_manifest(path)


def test_a_checkpoint_set_aside_is_kept_for_a_person_and_no_longer_counts(tmp_path):
    make_checkpoint(tmp_path, 1)
    moved = durable.set_aside(tmp_path, 1)
    assert durable.committed_steps(tmp_path) == []
    assert (moved / "__0_0.distcp").exists()
    make_checkpoint(tmp_path, 1)
    durable.set_aside(tmp_path, 1)  # a second time at the same step


def test_a_tracker_that_holds_no_number_is_an_error_with_the_way_out(tmp_path):
    assert durable.tracked_step(tmp_path) is None
    (tmp_path / durable.TRACKER).write_text("40\n")
    assert durable.tracked_step(tmp_path) == 40
    (tmp_path / durable.TRACKER).write_text("forty")
    with pytest.raises(ValueError, match="holds 'forty', not a step; write the number"):
        durable.tracked_step(tmp_path)


def test_a_run_that_is_started_over_has_another_id(tmp_path):
    first = durable.run_id(tmp_path, fresh=True)
    assert durable.run_id(tmp_path, fresh=False) == first
    assert durable.run_id(tmp_path, fresh=True) != first
