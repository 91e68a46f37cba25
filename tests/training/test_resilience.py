"""Unblocking gloo: the connections of the collectives go, those of the stores stay."""

import threading

import pytest
import torch
import torch.distributed as dist
from nvidia_resiliency_ext.inprocess.state import State

from drills.local_cluster import free_port
from training.resilience import AbortGloo


def wait_then_abort(rank: int, port: int, second_port: int) -> str:
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    dist.all_reduce(torch.ones(1))  # connect the pair
    if rank == 1:
        # This rank never joins the collective: rank 0 would wait for gloo's timeout of 30 minutes.
        result = store.get("aborted").decode()
    else:
        threading.Timer(0.5, AbortGloo(frozenset({port})), [State(rank=0, world_size=2)]).start()
        with pytest.raises(RuntimeError, match="(?i)connection|closed|gloo"):
            dist.all_reduce(torch.ones(1))
        store.set("aborted", "the store works")
        result = "freed"
    # Over the ruins of the first process group both ranks make a new one, as a restart does.
    dist.destroy_process_group()
    second = dist.TCPStore("127.0.0.1", second_port, 2, is_master=rank == 0)
    dist.init_process_group("gloo", store=second, rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1))
    return result


def test_a_rank_blocked_in_gloo_is_freed_and_the_stores_go_on_working(run_ranks):
    assert run_ranks(wait_then_abort, free_port(), free_port()) == ["freed", "the store works"]
