"""What a restart needs: gloo unblocked while the stores stay, and a store that survives the loss of a whole node."""

import datetime
import threading

import pytest
import torch
import torch.distributed as dist
from nvidia_resiliency_ext.inprocess.state import State
from nvidia_resiliency_ext.inprocess.store import TCPStore

from drills.local_cluster import free_port
from training.resilience import AbortGloo, RestartStore


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


def leave_after_a_silent_rank(store_type, monkeypatch):
    """Rank 0 of 2 at the termination barrier, where a monitor process stands in for rank 1, as NVRx 0.7.0 does."""
    monkeypatch.setenv("RANK", "0")
    store = store_type(host_name="127.0.0.1", port=free_port(), world_size=2, wait_for_workers=False)
    store.set_initial_rank(1, 1)
    at_once, soon = datetime.timedelta(0), datetime.timedelta(seconds=5)
    silent = store.get_initial_ranks([1])
    store.termination_barrier(ranks=silent, rendezvous_count=2, timeout=at_once)
    store.termination_barrier(ranks=[0], rendezvous_count=2, timeout=soon)


def test_a_rank_can_leave_after_a_node_fell_silent(monkeypatch):
    leave_after_a_silent_rank(RestartStore, monkeypatch)


def test_nvrx_alone_still_can_not(monkeypatch):
    # When this fails, NVRx has been mended and RestartStore can go.
    with pytest.raises(ValueError, match="invalid literal for int"):
        leave_after_a_silent_rank(TCPStore, monkeypatch)
