"""Fault injection: recorded before it strikes, once in the job's life, off unless configured."""

import multiprocessing
import signal

import pytest

from training.config import FaultSpec
from training.events import EventLog, read_events
from training.faults import FaultInjector, InjectedFaultError


def injector(tmp_path, *faults, rank=0, cycle=0) -> FaultInjector:
    return FaultInjector(faults, run_directory=tmp_path, rank=rank, events=EventLog(tmp_path, rank=rank, cycle=cycle))


def test_an_exception_strikes_once_even_when_the_step_is_replayed_by_a_new_process(tmp_path):
    fault = FaultSpec(kind="exception", step=3, rank=0)
    with pytest.raises(InjectedFaultError, match="exception@3:rank0"):
        injector(tmp_path, fault).strike(3)
    injector(tmp_path, fault, cycle=1).strike(3)
    assert [(event["event"], event["step"]) for event in read_events(tmp_path)] == [("fault", 3)]


def test_another_step_and_another_rank_are_left_alone(tmp_path):
    fault = FaultSpec(kind="exception", step=3, rank=0)
    injector(tmp_path, fault).strike(2)
    injector(tmp_path, fault, rank=1).strike(3)
    assert read_events(tmp_path) == []


def test_two_equal_faults_strike_twice(tmp_path):
    fault = FaultSpec(kind="exception", step=3, rank=0)
    for _ in range(2):
        with pytest.raises(InjectedFaultError):
            injector(tmp_path, fault, fault).strike(3)
    injector(tmp_path, fault, fault).strike(3)


def test_a_sigkill_is_recorded_before_it_kills(tmp_path):
    def die() -> None:
        injector(tmp_path, FaultSpec(kind="sigkill", step=1, rank=0)).strike(1)

    process = multiprocessing.get_context("fork").Process(target=die)
    process.start()
    process.join(timeout=30)
    assert process.exitcode == -signal.SIGKILL
    assert read_events(tmp_path)[0]["kind"] == "sigkill"
