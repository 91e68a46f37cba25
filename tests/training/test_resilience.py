"""Unblocking gloo: the connections of the collectives go, those of the stores stay."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from nvidia_resiliency_ext.inprocess.state import State

from drills.local_cluster import free_port
from training.resilience import AbortGloo


def wait_then_abort(rank: int, port: int) -> list:
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    dist.all_reduce(torch.ones(1))  # connect the pair
    started = time.monotonic()
    if rank == 1:
        # This rank never joins the collective: rank 0 would wait for gloo's timeout of 30 minutes.
        store.get("aborted")
        return ["store works", store.get("after").decode()]
    threading.Timer(0.5, AbortGloo(frozenset({port})), [State(rank=0, world_size=2)]).start()
    with pytest.raises(RuntimeError, match="(?i)connection|closed|gloo"):
        dist.all_reduce(torch.ones(1))
    unblocked = time.monotonic() - started
    store.set("aborted", "yes")
    store.set("after", "still here")
    return ["unblocked", unblocked < 20]


def without_barrier(rank: int, port: int) -> list:
    result = wait_then_abort(rank, port)
    # The process group is dead on purpose: replace it, so that the harness can say goodbye over a new one.
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port + 1, 2, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    return result


def test_a_rank_blocked_in_gloo_is_freed_and_the_stores_go_on_working(run_ranks):
    port = free_port()
    assert run_ranks(without_barrier, port) == [["unblocked", True], ["store works", "still here"]]
