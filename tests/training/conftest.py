"""Real ranks for the tests: forked processes that meet in a gloo process group."""

import multiprocessing
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

RunRanks = Callable[..., list]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu(n): needs n CUDA GPUs; skipped by name where there are fewer")


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    if marker is not None and torch.cuda.device_count() < marker.args[0]:
        pytest.skip(f"{item.name} needs {marker.args[0]} GPU(s), there are {torch.cuda.device_count()}")


@pytest.fixture
def run_ranks(tmp_path: Path) -> RunRanks:
    """run_ranks(function, *arguments, world_size=2): call function(rank, *arguments) on every rank.

    Returns the ranks' results in order. Fails the test with a rank's traceback when one raised.
    """
    return _runner(tmp_path)


@pytest.fixture(scope="module")
def module_run_ranks(tmp_path_factory: pytest.TempPathFactory) -> RunRanks:
    """`run_ranks` for fixtures of a whole module."""
    return _runner(tmp_path_factory.mktemp("ranks"))


def _runner(tmp_path: Path) -> RunRanks:
    def run(function, *arguments, world_size: int = 2) -> list:
        return run_on_ranks(function, *arguments, world_size=world_size, directory=tmp_path)

    return run


def run_on_ranks(function, *arguments, directory: Path, world_size: int = 2) -> list:
    """What the fixture `run_ranks` does; the ranks meet over a file in `directory`."""
    # fork: the ranks inherit torch instead of importing it, which takes seconds each.
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    store = str(directory / f"store-{len(list(directory.glob('store-*')))}")
    processes = [
        context.Process(target=_rank, args=(function, rank, world_size, store, queue, arguments))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        outcomes = [queue.get(timeout=120) for _ in processes]
        for process in processes:
            process.join(timeout=30)
    finally:
        for process in processes:
            process.kill()
    failures = [text for _, text, _ in outcomes if text]
    assert not failures, "\n".join(failures)
    return [result for _, _, result in sorted(outcomes, key=lambda outcome: outcome[0])]


def _rank(function, rank: int, world_size: int, store: str, queue, arguments) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        result = function(rank, *arguments)
        dist.barrier()
        dist.destroy_process_group()
        queue.put((rank, None, result))
    except BaseException:
        queue.put((rank, f"rank {rank}: {traceback.format_exc()}", None))
