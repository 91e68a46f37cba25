"""kill -9 of ranks while they save locally: the newest complete step is always there, whole and unmixed."""

import itertools
import multiprocessing
import os
import random
import resource
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from training.checkpoint import local_file
from training.checkpoint.layout import tensor_layout
from training.checkpoint.local import LocalCheckpointError, LocalTier

WORLD_SIZE = 2
CONTEXT = multiprocessing.get_context("fork")


def shards_of(rank: int, step: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((200_000,), float(step * 10 + rank)), "step": torch.tensor(step)}


def tier_of(rank: int, root: Path, replicas: int) -> LocalTier:
    return LocalTier(
        directory=root / f"node-{rank}",
        session="run",
        rank=rank,
        world_size=WORLD_SIZE,
        ranks_per_node=1,
        replicas=replicas,
        timeout=timedelta(seconds=30),
    )


def save(tier: LocalTier, rank: int, step: int) -> None:
    tensors = shards_of(rank, step)
    tier.save(
        step=step, tensors=tensors, layouts={n: tensor_layout(t) for n, t in tensors.items()}, manifest={"step": step}
    )


def load_newest(tier: LocalTier, rank: int) -> int:
    """The newest step on offer, loaded and held against what was saved; 0 without any."""
    steps = tier.restorable_steps()
    if not steps:
        return 0
    tensors, _, manifest = tier.load(max(steps))
    assert manifest["step"] == max(steps)
    assert all(torch.equal(tensors[name], wanted) for name, wanted in shards_of(rank, max(steps)).items())
    return max(steps)


def connect(rank: int, store: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE)


def restored(rank: int, root: Path, replicas: int) -> int:
    return load_newest(tier_of(rank, root, replicas), rank)


class KilledAt:
    """SIGKILLs its process at the given number of file operations: writes, renames and removals."""

    def __init__(self, operations: int) -> None:
        self.left = operations
        write, rename, unlink = local_file._write_all, Path.rename, Path.unlink

        def counted(operation):
            def run(*arguments, **keywords):
                self.left -= 1
                if self.left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return operation(*arguments, **keywords)

            return run

        local_file._write_all = counted(write)
        Path.rename = counted(rename)
        Path.unlink = counted(unlink)


def killed_while_saving(rank: int, root: Path, store: Path, victims: tuple, operations: int, replicas: int) -> None:
    connect(rank, store)
    tier = tier_of(rank, root, replicas)
    save(tier, rank, 10)
    if rank in victims:
        KilledAt(operations)
    save(tier, rank, 20)
    os.kill(os.getpid(), signal.SIGKILL)  # the save is over; the operations were fewer


@pytest.mark.parametrize(
    ("victims", "replicas"),
    [((0,), 0), ((1,), 0), ((0, 1), 1)],
    ids=["rank 0, no copies", "rank 1, no copies", "both ranks, with copies"],
)
def test_killed_at_any_file_operation_of_a_save_the_newest_complete_step_is_there(
    run_ranks, tmp_path, victims, replicas
):
    found = []
    for operations in itertools.count():
        root = tmp_path / f"disks-{operations}"
        arguments = (root, tmp_path / f"meet-{operations}", victims, operations, replicas)
        processes = [CONTEXT.Process(target=killed_while_saving, args=(rank, *arguments)) for rank in range(WORLD_SIZE)]
        for process in processes:
            process.start()
        for victim in victims:
            processes[victim].join(timeout=60)
        for process in processes:  # the whole group goes, where it was
            process.kill()
            process.join()
        steps = run_ranks(restored, root, replicas)
        assert steps[0] == steps[1]
        found.append(steps[0])
        if not any(list((root / f"node-{victim}").rglob("step-00000010.*")) for victim in victims):
            break
    assert set(found) == {10, 20}, found  # never nothing, and both sides of the commit have been seen
    assert found == sorted(found)
    assert len(found) > 5 * (1 + replicas)  # each file takes several writes, a rename and a removal


def save_for_ever(rank: int, root: Path, store: Path, replicas: int, news) -> None:
    connect(rank, store)
    tier = tier_of(rank, root, replicas)
    start = load_newest(tier, rank)
    news.send(("started", start))
    for step in itertools.count(start + 1):
        save(tier, rank, step)
        news.send(("saved", step))


def drain(pipe) -> list:
    messages = []
    try:
        while pipe.poll():
            messages.append(pipe.recv())
    except EOFError:  # the other end was killed
        pass
    return messages


@pytest.mark.parametrize("replicas", [0, 1])
def test_killed_at_random_instants_no_completed_save_is_lost(tmp_path, replicas):
    seed = time.time_ns() % 1_000_000
    print(f"seed {seed}")  # shown when it fails
    chance = random.Random(seed)
    complete = 0
    for attempt in range(12):
        pipes = [CONTEXT.Pipe(duplex=False) for _ in range(WORLD_SIZE)]
        processes = [
            CONTEXT.Process(
                target=save_for_ever, args=(rank, tmp_path / "disks", tmp_path / f"meet-{attempt}", replicas, pipe[1])
            )
            for rank, pipe in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(processes, pipes, strict=True):
            process.start()
            theirs.close()
        for ours, _ in pipes:
            assert ours.poll(60), f"attempt {attempt} did not start"
            assert ours.recv() >= ("started", complete), f"seed {seed}, attempt {attempt}"
        time.sleep(chance.uniform(0, 0.2))
        for process in chance.sample(processes, WORLD_SIZE):
            process.kill()
            time.sleep(chance.choice([0, 0.01]))
        for process in processes:
            process.join()
        complete = max([complete] + [step for ours, _ in pipes for _, step in drain(ours)])
        for ours, _ in pipes:
            ours.close()
    assert complete > 0


def disk_gets_full(rank: int, root: Path) -> list:
    tier = tier_of(rank, root, 1)
    save(tier, rank, 10)
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
    with pytest.raises(LocalCheckpointError) as error:
        save(tier, rank, 20)
    dist.barrier()
    leftovers = [str(path) for path in root.rglob("step-00000020*")]
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    before = load_newest(tier, rank)
    save(tier, rank, 30)  # there is room again
    return [str(error.value), leftovers, before, load_newest(tier, rank)]


def test_a_disk_that_takes_no_more_fails_the_save_on_every_rank_and_keeps_the_step_before(run_ranks, tmp_path):
    # A limit on the size of files stands in for a full disk: the write stops half-way with an OSError.
    (message, *rest), other = run_ranks(disk_gets_full, tmp_path)
    assert other == [message, *rest]
    assert "saving step 20 locally failed: rank 1: " in message
    assert "node-1/run/1 can't be written: File too large" in message
    assert rest == [[], 10, 30]


def change_while_saving(rank: int, root: Path) -> str:
    tier = tier_of(rank, root, 1)
    save(tier, rank, 10)
    tensors = shards_of(rank, 20)
    if rank == 0:  # the buffer is used again between being sent and being written
        write = local_file.write

        def changed(path, header, pieces):
            if header.rank == 0:
                tensors["weight"][1000] += 1
            return write(path, header, pieces)

        local_file.write = changed
    with pytest.raises(LocalCheckpointError) as error:
        tier.save(step=20, tensors=tensors, layouts={n: tensor_layout(t) for n, t in tensors.items()}, manifest={})
    assert load_newest(tier, rank) == 10
    return str(error.value)


def test_shards_that_change_while_they_are_saved_fail_the_save(run_ranks, tmp_path):
    messages = run_ranks(change_while_saving, tmp_path)
    assert messages[0] == messages[1]
    assert "rank 1's copy of rank 0's shards differs from what rank 0 wrote" in messages[0]


def peer_dies(rank: int, root: Path, store: Path, news) -> None:
    connect(rank, store)
    tier = tier_of(rank, root, 1)
    save(tier, rank, 10)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        save(tier, rank, 20)
    except LocalCheckpointError as error:
        news.send(str(error))


def test_a_peer_that_is_killed_fails_the_save_of_the_others_and_the_step_before_stays(run_ranks, tmp_path):
    ours, theirs = CONTEXT.Pipe(duplex=False)
    processes = [
        CONTEXT.Process(target=peer_dies, args=(rank, tmp_path / "disks", tmp_path / "meet", theirs))
        for rank in range(WORLD_SIZE)
    ]
    for process in processes:
        process.start()
    assert ours.poll(60)
    assert ours.recv().startswith("saving step 20 locally failed: a peer is gone")
    for process in processes:
        process.join(timeout=30)
    assert run_ranks(restored, tmp_path / "disks", 1) == [10, 10]
