"""Saves and restores over the tiers, with real ranks, the real NVRx writer process, real files and real kills."""

import errno
import functools
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

import psutil
import pytest
import torch

from tests.training.checkpoint.attempt import Attempt, meet, stored_values
from tests.training.conftest import run_on_ranks
from training.checkpoint.durable import TRACKER, committed_steps
from training.checkpoint.restorer import CheckpointError
from training.checkpoint.writer import open_binary


def save_and_restore(rank: int, directory: Path) -> list:
    attempt = Attempt(directory, rank, keep_latest=3)
    fresh = attempt.restore()
    attempt.train_to(8)
    attempt.close()
    again = Attempt(directory, rank, name="1-0", keep_latest=3)
    restored = again.restore()
    outcome = (again.values(), restored.moment[f"random{rank}"].tolist())
    again.close()
    return [fresh.step, fresh.tier, attempt.committed, restored.step, restored.tier, *outcome]


def test_a_save_is_committed_found_again_by_new_processes_and_read_by_plain_dcp(run_ranks, tmp_path):
    for rank, (step, tier, committed, restored, from_tier, values, moment) in enumerate(
        run_ranks(save_and_restore, tmp_path)
    ):
        assert (step, tier) == (0, None)
        assert committed == list(range(1, 9))
        assert (restored, from_tier) == (8, "durable")
        assert values == [8.0 + rank, 8.0, 8.0]
        assert moment == [8, rank]
    assert (tmp_path / TRACKER).read_text() == "8\n"
    assert committed_steps(tmp_path) == [6, 7, 8], "only the latest three are kept"
    assert stored_values(tmp_path, 8) == [8.0, 9.0]
    assert not list(tmp_path.glob(".*step*")), "nothing is left of what was written and deleted"


def save_while_training_goes_on(rank: int, directory: Path) -> list:
    attempt = Attempt(directory, rank, size=2_000_000, keep_latest=9, memory_interval_steps=1, interval_steps=3)
    attempt.restore()
    attempt.train_to(12, wait=False)  # updates follow at once: only before_update keeps them from the copy
    attempt.close()
    return attempt.committed


def test_a_save_holds_the_values_of_its_own_step_however_soon_training_goes_on(run_ranks, tmp_path):
    run_ranks(save_while_training_goes_on, tmp_path)
    assert committed_steps(tmp_path) == [3, 6, 9, 12]
    for step in committed_steps(tmp_path):
        assert stored_values(tmp_path, step, size=2_000_000) == [float(step), float(step) + 1]


def restart_in_process(rank: int, directory: Path) -> list:
    attempt = Attempt(directory, rank, interval_steps=2, memory_interval_steps=1)
    attempt.restore()
    attempt.train_to(5)  # 4 is durable, 5 is staged
    for tensor in attempt.live.values():
        tensor.fill_(float("nan"))
    again = Attempt(directory, rank, saver=attempt.saver, name="0-1", interval_steps=2, memory_interval_steps=1)
    restored = again.restore()
    outcome = [restored.step, restored.tier, again.holds(5), restored.moment[f"random{rank}"].tolist()]
    again.train_to(6)
    again.close()
    return outcome


def test_an_in_process_restart_reads_no_file_and_goes_on_from_the_newest_copy_in_memory(run_ranks, tmp_path):
    assert run_ranks(restart_in_process, tmp_path) == [[5, "memory", True, [5, 0]], [5, "memory", True, [5, 1]]]
    assert committed_steps(tmp_path) == [4, 6]
    assert stored_values(tmp_path, 6) == [6.0, 7.0]


def restart_with_one_new_process(rank: int, directory: Path) -> list:
    attempt = Attempt(directory, rank, interval_steps=2, memory_interval_steps=1)
    attempt.restore()
    attempt.train_to(5)
    if rank == 1:
        attempt.saver.close()
    saver = attempt.saver if rank == 0 else None  # rank 1's process is another: its memory is empty
    again = Attempt(directory, rank, saver=saver, name="1-0", interval_steps=2, memory_interval_steps=1)
    restored = again.restore()
    outcome = [restored.step, restored.tier, again.holds(4)]
    again.close()
    return outcome


def test_a_copy_in_memory_that_one_rank_lacks_is_used_by_none(run_ranks, tmp_path):
    assert run_ranks(restart_with_one_new_process, tmp_path) == [[4, "durable", True]] * 2


def restart_during_a_write(rank: int, directory: Path) -> list:
    attempt = Attempt(directory, rank, open_file=SlowFile(0.02), interval_steps=2)
    attempt.restore()
    attempt.train_to(2, wait=False)
    meet()
    before = committed_steps(directory)
    again = Attempt(directory, rank, saver=attempt.saver, name="0-1", interval_steps=2)
    restored = again.restore()
    saving = again.checkpointer.saving
    again.checkpointer.wait()
    committed = again.checkpointer.drain().committed
    again.close()
    return [before, restored.step, restored.tier, saving is not None, [one["step"] for one in committed]]


def test_a_write_in_flight_goes_on_over_an_in_process_restart_and_is_committed(run_ranks, tmp_path):
    for before, step, tier, saving, committed in run_ranks(restart_during_a_write, tmp_path):
        assert before == []
        assert (step, tier) == (2, "memory")
        assert saving
        assert committed == [2]
    assert stored_values(tmp_path, 2) == [2.0, 3.0]


def cut_off_by_new_processes(rank: int, directory: Path) -> list:
    attempt = Attempt(directory, rank, open_file=SlowFile(0.05))
    attempt.restore()
    attempt.train_to(1)
    attempt.train_to(2, wait=False)
    meet()
    during = sorted(path.name for path in directory.iterdir())
    meet()
    attempt.saver.close(abort=True)  # as when every process is killed
    again = Attempt(directory, rank, name="1-0")
    restored = again.restore()
    again.train_to(2)
    again.close()
    return [during, restored.step]


def test_a_save_cut_off_before_its_commit_does_not_exist_and_the_next_is_not_mixed_with_it(run_ranks, tmp_path):
    for during, restored in run_ranks(cut_off_by_new_processes, tmp_path):
        assert "step-00000002" not in during
        assert restored == 1
    assert committed_steps(tmp_path) == [1, 2]
    assert stored_values(tmp_path, 2) == [2.0, 3.0]
    assert not list(tmp_path.glob(".writing-*"))


class SlowFile:
    """Picklable `open` for the worker: every write takes a while."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, path: str, mode: str) -> BinaryIO:
        file = open_binary(path, mode)
        write = file.write

        class Slow:
            def write(inner, data):
                time.sleep(self._seconds)
                return write(data)

            fileno, flush, close = file.fileno, file.flush, file.close

        return Slow()  # pyright: ignore[reportReturnType]


class BrokenFile:
    """Picklable `open` for the worker of a rank: writing fails or hangs as the file `switch` says, if it exists."""

    def __init__(self, switch: Path) -> None:
        self._switch = switch

    def __call__(self, path: str, mode: str) -> BinaryIO:
        kind = self._switch.read_text() if self._switch.exists() else ""
        match kind:
            case "":
                return open_binary(path, mode)
            case "hang":
                time.sleep(3600)
            case "short":
                return _ShortFile(open_binary(path, mode))  # pyright: ignore[reportReturnType]
        number = getattr(errno, kind)
        raise OSError(number, os.strerror(number), path)


class _ShortFile:
    """Storage that takes half of each write and says nothing."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.fileno, self.flush, self.close = file.fileno, file.flush, file.close

    def write(self, data) -> int:
        self._file.write(data[: len(data) // 2])
        return len(data)


def meet_failing_storage(rank: int, directory: Path, kinds: list[str]) -> list:
    """One save for each kind of failure, which rank 1's storage has, each followed by a good one."""
    switch = directory.parent / "broken"
    open_file = BrokenFile(switch) if rank == 1 else open_binary
    attempt = Attempt(directory, rank, open_file=open_file, save_timeout_seconds=10.0, keep_latest=20)
    attempt.restore()
    attempt.train_to(1)
    for kind in kinds:
        meet()
        switch.write_text(kind)
        meet()
        attempt.train_to(attempt.step + 1)
        meet()
        switch.unlink(missing_ok=True)
        meet()
        attempt.train_to(attempt.step + 1)
    attempt.close()
    return [attempt.committed, [(one["step"], one["reason"]) for one in attempt.outcome.failed]]


def test_a_save_that_storage_refuses_is_lost_on_every_rank_and_training_goes_on(run_ranks, tmp_path):
    directory = tmp_path / "checkpoints"
    kinds = {
        "ENOSPC": "No space left on device",
        "EIO": "Input/output error",
        "EDQUOT": "Disk quota exceeded",
        "hang": "the background writer made no end in time and was killed",
    }
    for committed, failed in run_ranks(meet_failing_storage, directory, list(kinds)):
        assert committed == [1, 3, 5, 7, 9]
        assert [step for step, _ in failed] == [2, 4, 6, 8]
        for (_, reason), expected in zip(failed, kinds.values(), strict=True):
            assert reason.startswith("rank 1: ")
            assert expected in reason
    assert committed_steps(directory) == [1, 3, 5, 7, 9]
    assert stored_values(directory, 9) == [9.0, 10.0]


def restore_after_short_writes(rank: int, directory: Path) -> list:
    switch = directory.parent / "broken"
    attempt = Attempt(directory, rank, open_file=BrokenFile(switch) if rank == 1 else open_binary)
    attempt.restore()
    attempt.train_to(1)
    meet()
    switch.write_text("short")
    meet()
    attempt.train_to(2)
    attempt.close()
    return [attempt.committed, *look_again(rank, directory)]


def look_again(rank: int, directory: Path) -> list:
    """What new processes restore; without a writer, for they save nothing."""
    again = Attempt(directory, rank, name="1-0")
    try:
        restored = again.checkpointer.restore(lambda _manifest: None)
    except CheckpointError as error:
        return [str(error)]
    return [restored.step, restored.damaged, again.holds(restored.step), committed_steps(directory)]


def test_storage_that_loses_bytes_without_a_word_is_found_when_the_checkpoint_is_loaded(run_ranks, tmp_path):
    for committed, step, damaged, intact, left in run_ranks(restore_after_short_writes, tmp_path / "checkpoints"):
        assert committed == [1, 2], "nobody could know"
        assert step == 1
        assert len(damaged) == 1
        assert "__1_0.distcp is damaged: it has" in damaged[0]
        assert intact
        assert left == [1]


def fail_for_good(rank: int, directory: Path) -> str:
    switch = directory.parent / "broken"
    attempt = Attempt(directory, rank, open_file=BrokenFile(switch), max_failed_saves=2)
    attempt.restore()
    attempt.train_to(1)
    meet()
    switch.write_text("EIO")
    with pytest.raises(CheckpointError) as stopped:
        attempt.train_to(9)
    attempt.saver.close(abort=True)
    return str(stopped.value)


def test_saves_that_fail_again_and_again_stop_the_run_and_name_the_last_good_step(run_ranks, tmp_path):
    for message in run_ranks(fail_for_good, tmp_path / "checkpoints"):
        assert message.startswith("2 saves in a row failed, the last of step 3 (rank ")
        assert "Input/output error" in message
        assert "the newest good checkpoint is step 1; mend the storage" in message


def kill_writer(rank: int, directory: Path, moment: str) -> list:
    attempt = Attempt(directory, rank, open_file=SlowFile(0.02))
    attempt.restore()
    attempt.train_to(1)
    if moment == "writing":
        attempt.train_to(2, wait=False)
    if rank == 1:
        worker = attempt.saver.writer._process()
        worker.kill()
        worker.join()
    attempt.checkpointer.wait()
    attempt.train_to(4)
    attempt.close()
    return [attempt.committed, [one["reason"] for one in attempt.outcome.failed]]


def test_a_writer_killed_while_it_writes_fails_that_save_on_every_rank_and_is_replaced(run_ranks, tmp_path):
    for committed, reasons in run_ranks(kill_writer, tmp_path, "writing"):
        assert committed == [1, 3, 4]
        assert reasons == ["rank 1: the background writer died"]
    assert stored_values(tmp_path, 4) == [4.0, 5.0]


def test_a_writer_killed_between_saves_is_replaced_before_the_next(run_ranks, tmp_path):
    for committed, reasons in run_ranks(kill_writer, tmp_path, "idle"):
        assert (committed, reasons) == ([1, 2, 3, 4], [])


def skip_when_behind(rank: int, directory: Path) -> list:
    attempt = Attempt(directory, rank, open_file=SlowFile(0.05), when_behind="skip")
    attempt.restore()
    attempt.train_to(1)
    attempt.train_to(4, wait=False)
    attempt.close()
    attempt._collect()
    return [attempt.committed, [(one["step"], one["reason"]) for one in attempt.outcome.failed]]


def test_a_save_that_is_due_while_storage_is_behind_is_skipped_and_counted_if_so_set(run_ranks, tmp_path):
    skipped = "skipped, the save before it is not written yet"
    for committed, failed in run_ranks(skip_when_behind, tmp_path):
        assert committed == [1, 2]
        assert failed == [(3, skipped), (4, skipped)]


def save_three(rank: int, directory: Path) -> None:
    attempt = Attempt(directory, rank, keep_latest=9)
    attempt.restore()
    attempt.train_to(3)
    attempt.close()


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory) -> Path:
    """A directory with the checkpoints 1, 2 and 3 of two ranks, written once."""
    base = tmp_path_factory.mktemp("base")
    run_on_ranks(save_three, base / "checkpoints", directory=base)
    return base / "checkpoints"


def damage(path: Path, kind: str) -> None:
    file = path / ("manifest.json" if kind == "manifest" else ".metadata" if kind == "metadata" else "__1_0.distcp")
    match kind:
        case "missing":
            file.unlink()
        case "foreign":
            (path / "__7_0.distcp").write_bytes(b"other")
        case "flipped":
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 0x10
            file.write_bytes(content)
        case _:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damages", "step", "named"),
    [
        (["truncated"], 2, ["__1_0.distcp is damaged: it has"]),
        (["flipped"], 2, ["__1_0.distcp is damaged: its checksum"]),
        (["missing"], 2, ["__1_0.distcp is missing"]),
        (["foreign"], 2, ["__7_0.distcp does not belong"]),
        (["manifest"], 2, ["manifest.json is damaged"]),
        (["metadata"], 2, [".metadata is damaged"]),
        (["flipped", "missing"], 1, ["step-00000003/__1_0.distcp is damaged", "step-00000002/__1_0.distcp is missing"]),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_newest_good_one_used_by_every_rank(
    run_ranks, three_steps, tmp_path, damages, step, named
):
    directory = tmp_path / "checkpoints"
    shutil.copytree(three_steps, directory)
    for damaged_step, kind in zip((3, 2, 1), damages, strict=False):
        damage(directory / f"step-{damaged_step:08d}", kind)
    for restored, damaged, intact, committed in run_ranks(look_again, directory):
        assert restored == step
        assert intact, "nothing of the damaged one is left in the tensors"
        assert len(damaged) == len(named)
        for line, part in zip(damaged, named, strict=True):
            assert part in line
        assert committed == list(range(1, step + 1))
    assert len(list(directory.glob("damaged-step-*"))) == len(damages), "set aside for a person to see"


def test_no_good_checkpoint_left_is_an_error_on_every_rank_never_a_silent_start_from_zero(
    run_ranks, three_steps, tmp_path
):
    directory = tmp_path / "checkpoints"
    shutil.copytree(three_steps, directory)
    for step, kind in ((3, "flipped"), (2, "truncated"), (1, "missing")):
        damage(directory / f"step-{step:08d}", kind)
    for (message,) in run_ranks(look_again, directory):
        assert message.startswith(f"no good checkpoint is left in {directory}: ")
        assert "step-00000001/__1_0.distcp is missing" in message


def test_a_tracker_without_its_checkpoint_is_an_error_on_every_rank_never_a_silent_start_from_zero(run_ranks, tmp_path):
    (tmp_path / TRACKER).write_text("40\n")
    for (message,) in run_ranks(look_again, tmp_path):
        assert "says step 40, but" in message
        assert f"remove {TRACKER} to start over" in message


def change_world(rank: int, directory: Path, last: int) -> list:
    torch.manual_seed(0)
    attempt = Attempt(directory, rank)
    restored = attempt.restore()
    attempt.train_to(last)
    attempt.close()
    return [restored.step, restored.moment is None, attempt.live["shared"][0].item()]


def test_another_world_size_restores_the_tensors_without_the_ranks_own_state(run_ranks, tmp_path):
    run_ranks(change_world, tmp_path, 2)
    assert run_ranks(change_world, tmp_path, 3, world_size=1) == [[2, True, 3.0]]


def save_under_a_limit(rank: int, directory: Path) -> str:
    # As a full disk does: the write itself fails, in the worker process, which inherits the limit.
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    attempt = Attempt(directory, rank)
    attempt.saver.writer.start()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    attempt.restore()
    attempt.train_to(1)
    attempt.saver.close(abort=True)
    return attempt.outcome.failed[0]["reason"]


def test_a_write_that_the_kernel_refuses_is_reported_with_its_reason(run_ranks, tmp_path):
    for reason in run_ranks(save_under_a_limit, tmp_path):
        assert "File too large" in reason
    assert committed_steps(tmp_path) == []


def test_the_writer_dies_with_a_trainer_that_is_killed(tmp_path):
    code = """
import os, signal, torch
from training.checkpoint.saver import Saver
if __name__ == "__main__":
    saver = Saver(rank=0, device=torch.device("cpu"))
    saver.prepare({"x": torch.zeros(8)})
    saver.buffers()
    saver.commit(lambda: 0).result()
    print(saver.writer.worker_pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    (tmp_path / "trainer.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    killed = subprocess.run(
        [sys.executable, str(tmp_path / "trainer.py")], env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    pid = int(killed.stdout)
    _, alive = psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=10)
    assert alive == []


def restore_from_local(rank: int, directory: Path, *, strided: bool) -> list:
    local = {"directory": str(directory.parent / "local"), "interval_steps": 1, "replicas": 1}
    settings = {"interval_steps": 3, "memory": False, "local": local}
    attempt = Attempt(directory, rank, **settings)
    attempt.restore()
    while attempt.step < 4:
        attempt.train_to(attempt.step + 1)
        while attempt.checkpointer._replicating is not None:
            attempt.checkpointer.poll()
    attempt.checkpointer.close()
    again = Attempt(directory, rank, saver=attempt.saver, name="0-1", **settings)
    if strided:  # as on a GPU, the files can't be read straight into the live tensors
        again.live[f"w{rank}"] = torch.zeros(2000)[::2]
    restored = again.checkpointer.restore(lambda _manifest: None)
    mislabelled = [step for step, buffer in again.saver.staged().items() if buffer.tensors["shared"][0].item() != step]
    outcome = [restored.step, restored.tier, again.holds(4), restored.moment[f"random{rank}"].tolist(), mislabelled]
    again.close()
    return outcome


@pytest.mark.parametrize("strided", [False, True])
def test_a_newer_local_copy_is_restored_and_no_staged_copy_is_labelled_with_another_step(run_ranks, tmp_path, strided):
    function = functools.partial(restore_from_local, strided=strided)
    for rank, outcome in enumerate(run_ranks(function, tmp_path / "checkpoints")):
        assert outcome == [4, "local", True, [4, rank], []]
    assert committed_steps(tmp_path / "checkpoints") == [3]
