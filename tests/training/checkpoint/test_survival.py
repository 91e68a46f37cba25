"""SIGKILL at random instants of saving, committing, pruning and loading: a good checkpoint is always left.

The quick subset is part of `make test`; `make soak` sets SURVIVAL_ROUNDS and, to repeat a run, SURVIVAL_SEED.
"""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from tests.training.checkpoint.attempt import Attempt
from training.checkpoint import durable

ROUNDS = int(os.environ.get("SURVIVAL_ROUNDS", "3"))
SEED = int(os.environ.get("SURVIVAL_SEED", "20261201"))
SIZE = 500_000
INTERVAL = 2


def train(rank: int, directory: Path, store: Path, name: str, report) -> None:
    """One life: restore, say from where, and train until killed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    attempt = Attempt(directory, rank, name=name, size=SIZE, interval_steps=INTERVAL, memory_interval_steps=1)
    restored = attempt.restore()
    report.put((rank, restored.step, restored.damaged, attempt.holds(restored.step), attempt.saver.writer.worker_pid))
    while True:
        attempt.train_to(attempt.step + 1, wait=False)
        if rank == 0 and attempt.committed:
            (directory.parent / "committed").write_text(str(attempt.committed[-1]))
        time.sleep(0.01)


def one_life(directory: Path, number: int, chance: random.Random, *, last: bool = False) -> list[tuple]:
    """Start both ranks, kill at a random instant, and return what each of them restored."""
    context = multiprocessing.get_context("fork")
    report = context.Queue()
    store = directory.parent / f"store-{number}"
    ranks = [context.Process(target=train, args=(rank, directory, store, f"{number}-0", report)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        restored = sorted(report.get(timeout=120) for _ in ranks)
        if not last:
            # From the first step, when the writer still loads, to the middle of many saves.
            time.sleep(chance.choice([0.0, 0.05, 0.3, 1.0, 3.0, 6.0]) * chance.random() + 0.01)
        return restored
    finally:
        victims = [psutil.Process(process.pid) for process in ranks]
        workers = [child for victim in victims for child in victim.children(recursive=True)]
        for process in [*victims, *workers] if chance.random() < 0.5 else victims:
            process.send_signal(signal.SIGKILL)
        for process in ranks:
            process.join()
        _, alive = psutil.wait_procs(workers, timeout=20)
        assert alive == [], "a writer outlived its trainer"


def test_no_instant_of_death_costs_more_than_the_work_since_the_last_commit(tmp_path):
    chance = random.Random(SEED)
    print(f"SURVIVAL_ROUNDS={ROUNDS} SURVIVAL_SEED={SEED}")
    directory = tmp_path / "checkpoints"
    promised = 0
    for number in range(ROUNDS + 1):
        for _rank, step, damaged, intact, _pid in one_life(directory, number, chance, last=number == ROUNDS):
            assert intact, f"round {number}: the tensors are not those of step {step}"
            assert damaged == (), f"round {number}"
            assert step >= promised, f"round {number}: step {promised} had been committed"
            assert step % INTERVAL == 0
        tracked = directory.parent / "committed"
        promised = int(tracked.read_text()) if tracked.exists() else 0
        for step in durable.committed_steps(directory):
            path = durable.checkpoint_path(directory, step)
            assert durable.damage(path, durable.read_manifest(path)) == []
