"""The ring of connections by which a rank learns that its neighbour's node is gone: real processes and sockets."""

import contextlib
import multiprocessing
import os
import signal
import socket
import time

import pytest
import torch.distributed as dist

from training import peer_watch
from training.peer_watch import PeerWatch

_FORK = multiprocessing.get_context("fork")


def start_watch(store_file, rank, world_size):
    store = dist.FileStore(str(store_file), world_size)
    return PeerWatch(
        store, rank=rank, world_size=world_size, address="127.0.0.1", silent_seconds=30, on_loss=peer_watch.leave
    )


def sit(store_file, rank, world_size, ready, end, forks):
    """One rank: watches, and ends in order when told to."""
    watch = start_watch(store_file, rank, world_size)
    if forks and os.fork() == 0:  # as NVRx's monitor process does
        time.sleep(60)
        os._exit(0)
    ready.release()
    end.wait()
    watch.close()


class Ring:
    def __init__(self, store_file, world_size, *, forking_rank=None):
        ready, self.end = _FORK.Semaphore(0), _FORK.Event()
        self.ranks = [
            _FORK.Process(target=_own_group, args=(store_file, rank, world_size, ready, self.end, rank == forking_rank))
            for rank in range(world_size)
        ]
        for rank in self.ranks:
            rank.start()
        for _ in self.ranks:
            assert ready.acquire(timeout=30)

    def codes(self, *ranks):
        for rank in ranks:
            self.ranks[rank].join(timeout=20)
        return [self.ranks[rank].exitcode for rank in ranks]


def _own_group(*arguments):
    os.setpgrp()
    sit(*arguments)


@pytest.fixture
def ring(tmp_path):
    started = []

    def start(world_size, **options):
        started.append(Ring(tmp_path / "store", world_size, **options))
        return started[-1]

    yield start
    for each in started:
        for rank in each.ranks:
            if rank.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)
            rank.join()


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_the_rank_before_a_killed_one_leaves_at_once_and_so_does_the_whole_ring(ring, victim):
    three = ring(3)
    three.ranks[victim].kill()
    survivors = [rank for rank in range(3) if rank != victim]
    assert three.codes(*survivors) == [1, 1]


def test_ranks_that_end_in_order_say_goodbye(ring):
    three = ring(3)
    three.end.set()
    assert three.codes(0, 1, 2) == [0, 0, 0]


def test_a_stranger_that_connects_takes_nobodys_goodbye_away(tmp_path):
    watch = start_watch(tmp_path / "store", 0, 1)
    own_port = watch._listener.getsockname()[1]
    with socket.create_connection(("127.0.0.1", own_port)) as stranger:
        watch.close()  # leaves by exit 1 if its own goodbye were missing
        assert stranger.recv(1) == b"."


def test_a_killed_rank_whose_monitor_process_lives_is_left_to_its_own_launcher(ring):
    two = ring(2, forking_rank=1)
    two.ranks[1].kill()
    two.ranks[1].join()
    two.ranks[0].join(timeout=1)
    assert two.ranks[0].is_alive()
    os.killpg(two.ranks[1].pid, signal.SIGKILL)  # the monitor process goes too: now the pod is gone
    assert two.codes(0) == [1]


def test_a_lone_rank_watches_itself_and_ends(tmp_path):
    start_watch(tmp_path / "store", 0, 1).close()


def test_a_machine_that_falls_silent_is_found_by_keep_alive(tmp_path):
    watch = start_watch(tmp_path / "store", 0, 1)
    option = {name: watch._connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in (
        "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")}  # fmt: skip
    assert watch._connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert option["TCP_KEEPIDLE"] + option["TCP_KEEPINTVL"] * option["TCP_KEEPCNT"] == 30
    watch.close()


def test_the_own_address_is_the_one_that_the_stores_host_sees():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert peer_watch.own_address("127.0.0.1", server.getsockname()[1]) == "127.0.0.1"
