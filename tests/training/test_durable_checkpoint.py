"""Durable checkpoints with the real NVRx background writer: two ranks, real files, real kills."""

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import cast

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp

from training.checkpoint.durable import TRACKER, CheckpointError, DurableCheckpointer, committed_steps
from training.checkpoint.writer import BackgroundWriter, CheckpointWriterError
from training.config import CheckpointConfig

MANIFEST = {"world_size": 2, "loss": 1.0, "identity": {}}


def state_of(rank: int, value: float) -> dict:
    # Each rank its own tensor, as each rank of a sharded model has.
    return {f"w{rank}": torch.full((1000,), value + rank), "shared": torch.full((10,), value)}


class Saver:
    """One rank's writer and checkpointer."""

    def __init__(self, directory: Path, rank: int, *, attempt: str = "0-0", keep_latest: int = 3) -> None:
        self.rank = rank
        self.writer = BackgroundWriter(rank=rank)
        self.writer.get_ready()
        self.config = CheckpointConfig(directory=str(directory), interval_steps=1, keep_latest=keep_latest)
        self.checkpointer = DurableCheckpointer(self.config, writer=self.writer, attempt=attempt)

    def save(self, step: int) -> None:
        self.checkpointer.save(state_of(self.rank, step), step=step, manifest=MANIFEST)
        self.checkpointer.wait()

    def worker_pid(self) -> int:
        return self.writer._queue._get_async_caller().process.pid


def save_and_load(rank: int, directory: Path) -> list:
    saver = Saver(directory, rank)
    assert saver.checkpointer.newest() is None
    state = state_of(rank, 5.0)
    saver.checkpointer.save(state, step=5, manifest=MANIFEST)
    state[f"w{rank}"].zero_()  # training goes on while the files are written
    committed = saver.checkpointer.wait()
    loaded = state_of(rank, 0.0)
    manifest = saver.checkpointer.newest()
    saver.checkpointer.load(loaded, step=manifest["step"])
    for step in (6, 7, 8):
        saver.save(step)
    saver.writer.close()
    return [committed.step, manifest["step"], loaded[f"w{rank}"][0].item()]


def test_a_committed_save_holds_the_values_of_the_moment_of_saving(run_ranks, tmp_path):
    assert run_ranks(save_and_load, tmp_path) == [[5, 5, 5.0], [5, 5, 6.0]]
    assert (tmp_path / TRACKER).read_text() == "8\n"
    assert committed_steps(tmp_path) == [6, 7, 8], "only the latest three are kept"
    # Standard DCP format: plain dcp.load in one process reads what two ranks wrote.
    whole = {"w0": torch.zeros(1000), "w1": torch.zeros(1000)}
    dcp.load(whole, checkpoint_id=str(tmp_path / "step-00000008"))
    assert (whole["w0"][0].item(), whole["w1"][0].item()) == (8.0, 9.0)


def cut_off_second_save(rank: int, directory: Path) -> list:
    saver = Saver(directory, rank)
    saver.checkpointer.newest()
    saver.save(1)
    saver.checkpointer.save(state_of(rank, 2.0), step=2, manifest=MANIFEST)
    torch.distributed.barrier()
    during = sorted(path.name for path in directory.iterdir())
    torch.distributed.barrier()
    # The attempt ends here, before the commit; the next one starts, as after an in-process restart.
    saver.writer.get_ready()
    following = DurableCheckpointer(saver.config, writer=saver.writer, attempt="0-1")
    newest = following.newest()["step"]
    saver.checkpointer = following
    saver.save(2)  # and reaches step 2 once more
    loaded = state_of(rank, 0.0)
    following.load(loaded, step=following.newest()["step"])
    saver.writer.close()
    return [during, newest, loaded["shared"][0].item()]


def test_a_save_cut_off_before_its_commit_does_not_exist_for_the_next_attempt(run_ranks, tmp_path):
    for during, newest, value in run_ranks(cut_off_second_save, tmp_path):
        assert ".writing-step-00000002-0-0" in during
        assert "step-00000002" not in during
        assert newest == 1
        assert value == 2.0
    assert not list(tmp_path.glob(".writing-*"))
    assert committed_steps(tmp_path) == [1, 2]


def kill_writer(rank: int, directory: Path) -> list:
    saver = Saver(directory, rank)
    saver.checkpointer.newest()
    saver.save(1)
    saver.checkpointer.save(state_of(rank, 2.0), step=2, manifest=MANIFEST)
    if rank == 1:
        # Between two looks the worker is gone, and with it whatever it had not reported.
        os.kill(saver.worker_pid(), signal.SIGKILL)
        saver.writer._queue._get_async_caller().process.join()
        saver.writer._queue.async_calls[0].async_caller.comp_q = multiprocessing.Queue()
    with pytest.raises(CheckpointError, match="saving step 2 failed: a background checkpoint writer died"):
        saver.checkpointer.wait()
    saver.writer.get_ready()
    saver.checkpointer = DurableCheckpointer(saver.config, writer=saver.writer, attempt="0-1")
    newest = saver.checkpointer.newest()["step"]
    saver.save(3)
    saver.writer.close()
    return newest


def test_a_dead_writer_fails_its_save_on_every_rank_and_the_next_save_works(run_ranks, tmp_path):
    assert run_ranks(kill_writer, tmp_path) == [1, 1]
    assert committed_steps(tmp_path) == [1, 3]
    loaded = {"w1": torch.zeros(1000)}
    dcp.load(loaded, checkpoint_id=str(tmp_path / "step-00000003"))
    assert loaded["w1"][0].item() == 4.0


def save_at_once(rank: int, directory: Path) -> int:
    saver = Saver(directory, rank)
    pings = []
    saver.checkpointer = DurableCheckpointer(
        saver.config, writer=saver.writer, attempt="0-0", ping=lambda: pings.append(1)
    )
    saver.checkpointer.newest()
    saver.save(1)  # the worker has just been started and loads its libraries for seconds
    saver.writer.close()
    return len(pings)


def test_a_save_that_has_to_wait_pings_the_in_process_layer_meanwhile(run_ranks, tmp_path):
    (pings,) = run_ranks(save_at_once, tmp_path, world_size=1)
    assert pings > 10


def kill_results_queue(rank: int, directory: Path) -> int:
    saver = Saver(directory, rank)
    saver.checkpointer.newest()
    os.kill(saver.writer._manager._process.pid, signal.SIGKILL)
    saver.writer._manager._process.join()
    with pytest.raises(CheckpointWriterError, match="died"):
        saver.save(1)
    saver.writer.get_ready()
    saver.save(1)
    saver.writer.close()
    return committed_steps(directory)[-1]


def test_a_dead_results_queue_is_noticed_at_the_next_save_and_replaced(run_ranks, tmp_path):
    assert run_ranks(kill_results_queue, tmp_path, world_size=1) == [1]


def write_beyond_the_limit(rank: int, directory: Path) -> str:
    # As a full disk or a quota does: the write itself fails, in the worker process, which inherits the limit.
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    saver = Saver(directory, rank)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    saver.checkpointer.newest()
    saver.checkpointer.save(state_of(rank, 1.0), step=1, manifest=MANIFEST)
    try:
        saver.checkpointer.wait()
    except CheckpointError as error:
        return str(error)
    finally:
        saver.writer.close()
    return "no error"


def test_a_write_that_fails_is_an_error_on_every_rank_and_leaves_no_checkpoint(run_ranks, tmp_path):
    messages = run_ranks(write_beyond_the_limit, tmp_path)
    assert all(message.startswith("saving step 1 failed: rank 0:") for message in messages), messages
    assert "File too large" in messages[0]
    assert committed_steps(tmp_path) == []


def look_for_newest(_rank: int, directory: Path) -> str:
    config = CheckpointConfig(directory=str(directory), interval_steps=1)
    no_writer = cast(BackgroundWriter, None)  # looking needs none
    try:
        DurableCheckpointer(config, writer=no_writer, attempt="0-0").newest()
    except CheckpointError as error:
        return str(error)
    return "no error"


def test_a_tracker_without_its_checkpoint_is_an_error_on_every_rank_never_a_silent_start_from_zero(run_ranks, tmp_path):
    (tmp_path / TRACKER).write_text("40\n")
    for message in run_ranks(look_for_newest, tmp_path):
        assert "says step 40, but" in message
        assert f"remove {TRACKER} to start over" in message


def test_a_directory_without_manifest_or_metadata_is_no_checkpoint(tmp_path):
    for name, files in (("step-00000001", ["manifest.json"]), ("step-00000002", [".metadata"]), ("step-00000003", [])):
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).touch()
    assert committed_steps(tmp_path) == []


def save_two(rank: int, directory: Path) -> None:
    saver = Saver(directory, rank)
    saver.checkpointer.newest()
    for step in (1, 2):
        saver.save(step)
    saver.writer.close()


def truncate(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)


def test_a_truncated_file_of_the_newest_checkpoint_is_named_on_every_rank_with_the_way_out(run_ranks, tmp_path):
    run_ranks(save_two, tmp_path)
    newest = tmp_path / "step-00000002"
    for file in (next(newest.glob("__1_*.distcp")), newest / "manifest.json"):
        truncate(file)
        for message in run_ranks(look_for_newest, tmp_path):
            assert message.startswith(f"{file} is damaged")
            assert message.endswith("remove it to go on from step 1")


def test_a_copy_of_a_checkpoint_beside_it_does_not_matter(tmp_path):
    for name in ("step-00000004", "step-00000008.bak", "step-8"):
        (tmp_path / name).mkdir()
        for file in ("manifest.json", ".metadata"):
            (tmp_path / name / file).touch()
    assert committed_steps(tmp_path) == [4]


def test_writer_and_results_queue_die_with_a_trainer_that_is_killed(tmp_path):
    code = """
import os, sys, signal
from training.checkpoint.writer import BackgroundWriter, CheckpointWriterError
if __name__ == "__main__":
    writer = BackgroundWriter(rank=0)
    writer.get_ready()
    writer.get_ready()
    print(writer._queue._get_async_caller().process.pid, writer._manager._process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    (tmp_path / "trainer.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    killed = subprocess.run(
        [sys.executable, str(tmp_path / "trainer.py")], env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    pids = [int(word) for word in killed.stdout.split()]
    assert len(pids) == 2
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=10)
    assert alive == []
