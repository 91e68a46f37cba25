"""Fault injection: recorded before it strikes, once in the job's life, off unless configured; every kind for real."""

import json
import multiprocessing
import os
import signal
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from pydantic import ValidationError

from training.checkpoint import durable
from training.config_faults import (
    CLUSTER_KINDS,
    GPU_KINDS,
    START_MOMENTS,
    STORAGE_KINDS,
    FaultKind,
    FaultSpec,
    Moment,
)
from training.events import EventLog, read_events
from training.faults import _STRIKES, FaultInjector, FaultyFiles, InjectedFaultError, Targets, memory_limit_can_be_set


def injector(tmp_path, *faults, rank=0, cycle=0) -> FaultInjector:
    return FaultInjector(
        faults, run_directory=tmp_path, rank=rank, node=3, events=EventLog(tmp_path, rank=rank, cycle=cycle)
    )


def test_an_exception_strikes_once_even_when_the_step_is_replayed_by_a_new_process(tmp_path):
    fault = FaultSpec(kind="exception", step=3, rank=0)
    with pytest.raises(InjectedFaultError, match="exception@3:rank0"):
        injector(tmp_path, fault).at(Moment.BACKWARD, 3)
    injector(tmp_path, fault, cycle=1).at(Moment.BACKWARD, 3)
    assert [(event["event"], event["step"], event["moment"]) for event in read_events(tmp_path)] == [
        ("fault", 3, "backward")
    ]


def test_another_step_another_rank_and_another_moment_are_left_alone(tmp_path):
    fault = FaultSpec(kind="exception", step=3, rank=0)
    injector(tmp_path, fault).at(Moment.BACKWARD, 2)
    injector(tmp_path, fault).at(Moment.FORWARD, 3)
    injector(tmp_path, fault, rank=1).at(Moment.BACKWARD, 3)
    assert read_events(tmp_path) == []


def test_two_equal_faults_strike_twice(tmp_path):
    fault = FaultSpec(kind="exception", step=3, rank=0)
    for _ in range(2):
        with pytest.raises(InjectedFaultError):
            injector(tmp_path, fault, fault).at(Moment.BACKWARD, 3)
    injector(tmp_path, fault, fault).at(Moment.BACKWARD, 3)


@pytest.mark.parametrize("moment", START_MOMENTS)
def test_before_the_first_step_starts_are_counted_over_processes(tmp_path, moment):
    fault = FaultSpec(kind="exception", step=2, rank=0, moment=moment)
    injector(tmp_path, fault).at(moment)
    injector(tmp_path, fault, cycle=1).at(moment)
    with pytest.raises(InjectedFaultError):
        injector(tmp_path, fault, cycle=2).at(moment)
    injector(tmp_path, fault, cycle=3).at(moment)


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ({"kind": "flood", "step": 1, "rank": 0}, "kind"),
        ({"kind": "sigkill", "step": 1, "rank": 0, "moment": "lunch"}, "moment"),
        ({"kind": "sigkill", "step": 0, "rank": 0}, "step 0 is none; steps count from 1"),
        ({"kind": "sigkill", "step": 5, "rank": 1, "moment": "commit"}, "rank 1 commits nothing.*choose rank 0"),
        ({"kind": "nan_gradient", "step": 5, "rank": 1, "moment": "import"}, "can't strike at import; choose one of"),
        ({"kind": "slow", "step": 5, "rank": 1, "seconds": 0}, "seconds"),
    ],
)
def test_faults_that_make_no_sense_are_refused(fault, problem):
    with pytest.raises(ValidationError, match=problem):
        FaultSpec.model_validate(fault)


def test_kinds_have_their_usual_moment_and_say_another_one():
    assert str(FaultSpec(kind="sigkill", step=4, rank=1)) == "sigkill@4:rank1"
    assert FaultSpec(kind="writer_death", step=4, rank=1).moment is Moment.BACKGROUND_WRITE
    assert str(FaultSpec(kind="hang", step=0, rank=1, moment="import")) == "hang@0:rank1:import"


def test_every_kind_has_a_way_to_strike():
    assert {*_STRIKES, *CLUSTER_KINDS, *STORAGE_KINDS} == set(FaultKind)


def in_child(tmp_path, fault: FaultSpec, targets: Targets | None = None):
    """Strike in a process of its own."""

    def strike() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        struck = injector(tmp_path, fault)
        struck.targets = targets
        struck.at(fault.moment, fault.step)

    process = multiprocessing.get_context("fork").Process(target=strike)
    process.start()
    return process


KILLED_BY = {
    "sigkill": signal.SIGKILL,
    "sigterm": signal.SIGTERM,
    "segfault": signal.SIGSEGV,
    "abort": signal.SIGABRT,
    "out_of_memory": signal.SIGKILL,
}


@pytest.mark.parametrize("kind", KILLED_BY)
def test_a_process_that_is_killed_has_recorded_it_before(tmp_path, kind):
    if kind == "out_of_memory" and not memory_limit_can_be_set():
        pytest.skip("no memory cgroup may be made here, and this process has no limit")
    process = in_child(tmp_path, FaultSpec(kind=kind, step=1, rank=0))
    process.join(timeout=60)
    assert process.exitcode == -KILLED_BY[kind]
    assert [event["kind"] for event in read_events(tmp_path)] == [kind]


@pytest.mark.parametrize("kind", ["hang", "hang_gil", "sigstop"])
def test_a_process_that_hangs_is_there_until_it_is_killed(tmp_path, kind):
    process = in_child(tmp_path, FaultSpec(kind=kind, step=1, rank=0))
    while not read_events(tmp_path):
        time.sleep(0.01)
    process.join(timeout=0.5)
    assert process.is_alive()
    if kind == "sigstop":
        assert psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
    process.kill()
    process.join(timeout=30)


@pytest.mark.parametrize("kind", ["async_exception", "signal_exception"])
def test_exceptions_come_from_elsewhere(tmp_path, kind):
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(InjectedFaultError):
        injector(tmp_path, FaultSpec(kind=kind, step=1, rank=0)).at(Moment.BACKWARD, 1)
    signal.signal(signal.SIGUSR1, before)


def test_sigint_is_a_keyboard_interrupt(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        injector(tmp_path, FaultSpec(kind="sigint", step=1, rank=0)).at(Moment.BACKWARD, 1)


def test_a_gradient_becomes_nan(tmp_path):
    model = torch.nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    struck = injector(tmp_path, FaultSpec(kind="nan_gradient", step=1, rank=0))
    struck.targets = Targets(model, SimpleNamespace(), tmp_path)
    struck.at(Moment.OPTIMIZER, 1)
    assert model.weight.grad.isnan().all()


def test_a_corrupt_checkpoint_differs_in_one_bit_of_its_newest_step(tmp_path):
    for step in (5, 10):
        folder = durable.checkpoint_path(tmp_path, step)
        folder.mkdir()
        for name in (durable.MANIFEST, durable.METADATA):
            (folder / name).write_text("{}")
        (folder / "__0_0.distcp").write_bytes(bytes(1000))
    process = in_child(
        tmp_path, FaultSpec(kind="corrupt_checkpoint", step=1, rank=0), Targets(None, SimpleNamespace(), tmp_path)
    )
    process.join(timeout=30)
    assert process.exitcode == -signal.SIGKILL
    damaged = (durable.checkpoint_path(tmp_path, 10) / "__0_0.distcp").read_bytes()
    assert sum(byte.bit_count() for byte in damaged) == 1
    assert len(damaged) == 1000
    assert not any((durable.checkpoint_path(tmp_path, 5) / "__0_0.distcp").read_bytes())


@pytest.mark.parametrize(
    ("kind", "reason"), [("storage_full", "No space left on device"), ("storage_error", "Input/output error")]
)
def test_storage_fails_at_the_next_write_and_works_again_after_it(tmp_path, kind, reason):
    files = FaultyFiles(FaultKind(kind), 0.1, tmp_path / "struck")
    with closing(files(str(tmp_path / "shard"), "wb")) as file, pytest.raises(OSError, match=reason):
        file.write(b"x")
    with closing(files(str(tmp_path / "shard"), "wb")) as file:
        file.write(b"x")
    assert (tmp_path / "shard").read_bytes() == b"x"


def test_storage_that_stalls_has_written_in_the_end(tmp_path):
    files = FaultyFiles(FaultKind.STORAGE_STALL, 0.2, tmp_path / "struck")
    with closing(files(str(tmp_path / "shard"), "wb")) as file:
        began = time.monotonic()
        file.write(b"x")
    assert time.monotonic() - began >= 0.2
    assert (tmp_path / "shard").read_bytes() == b"x"


def test_the_loss_of_a_node_is_asked_of_the_cluster(tmp_path):
    process = in_child(tmp_path, FaultSpec(kind="node_death", step=1, rank=0))
    request = tmp_path / "faults/0.request"
    while not request.exists():
        time.sleep(0.01)
    assert json.loads(request.read_text()) == {"kind": "node_death", "node": 3}
    assert process.is_alive()  # it waits for its end
    process.kill()
    process.join(timeout=30)


def test_a_launcher_dies_by_its_rank(tmp_path):
    """The struck process's parent stands for ft_launcher."""
    launcher = os.fork()
    if launcher == 0:
        in_child(tmp_path, FaultSpec(kind="launcher_death", step=1, rank=0)).join()
        os._exit(0)
    _, status = os.waitpid(launcher, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    orphan = read_events(tmp_path)[0]["pid"]
    os.kill(orphan, signal.SIGKILL)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu(1): needs a CUDA device")
@pytest.mark.parametrize("kind", GPU_KINDS)
def test_gpu_faults_end_or_block_the_device(tmp_path, kind):
    import subprocess
    import sys

    script = (
        "from pathlib import Path; from training.config_faults import *; from training.events import EventLog;"
        "from training.faults import FaultInjector; import torch;"
        f"f=FaultSpec(kind='{kind}', step=1, rank=0);"
        f"events=EventLog(Path('{tmp_path}'), rank=0, cycle=0);"
        f"FaultInjector((f,), run_directory=Path('{tmp_path}'), rank=0, node=0, events=events)"
        ".at(f.moment, 1); torch.cuda.synchronize()"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2])
    try:
        assert process.wait(timeout=60) != 0
        assert kind == FaultKind.GPU_ERROR
    except subprocess.TimeoutExpired:
        assert kind == FaultKind.GPU_HANG
    finally:
        process.kill()
