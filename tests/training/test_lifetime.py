"""A helper process that is still starting survives its trainer's SIGTERM, but not its trainer's own wish."""

import multiprocessing
import os
import signal
import time

import pytest

from training.lifetime import deaf_to_sigterm, leave_process_group


def helper(started, go) -> None:
    started.set()
    go.wait(30)
    leave_process_group()
    time.sleep(60)


def parent(outcome, sender: str) -> None:
    """A trainer in a group of its own, with one helper that is slow to start."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, lambda *_: None)
    context = multiprocessing.get_context("fork")
    started, go = context.Event(), context.Event()
    with deaf_to_sigterm():
        process = context.Process(target=helper, args=(started, go))
        process.start()
    started.wait(30)
    if sender == "launcher":
        outcome.put(os.getpid())
        time.sleep(1)
    else:
        process.terminate()
    go.set()
    process.join(1 if sender == "launcher" else 30)
    outcome.put((process.is_alive(), process.exitcode))
    process.kill()


@pytest.mark.parametrize(("sender", "expected"), [("launcher", (True, None)), ("parent", (False, 143))])
def test_only_the_parents_sigterm_ends_a_helper_that_was_starting(sender, expected):
    context = multiprocessing.get_context("fork")
    outcome = context.Queue()
    trainer = context.Process(target=parent, args=(outcome, sender))
    trainer.start()
    if sender == "launcher":
        os.killpg(outcome.get(timeout=30), signal.SIGTERM)
    assert outcome.get(timeout=60) == expected
    trainer.join(30)
