"""What NVRx 0.7.0's local checkpoints do as they come, beside what ours do: why each method was replaced."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager import SameMachineReplicationException
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from nvidia_resiliency_ext.checkpointing.local.replication.group_utils import GroupWrapper
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from training.checkpoint.layout import local_part, tensor_layout
from training.checkpoint.local import LocalCheckpointError, LocalTier
from training.checkpoint.local_exchange import CpuGroup, ShardState
from training.checkpoint.local_file import Header, as_bytes


def state_of(rank: int, tensor: torch.Tensor | None = None, step: int = 10) -> ShardState:
    tensor = torch.full((1000,), float(rank + 1)) if tensor is None else tensor
    return ShardState(Header("run", step, rank, 2, "x", {"w": tensor_layout(tensor)}, {}), [as_bytes(tensor)])


def tier_of(rank: int, directory: Path, replicas: int = 0) -> LocalTier:
    return LocalTier(
        directory=directory,
        session="run",
        rank=rank,
        world_size=2,
        ranks_per_node=1,
        replicas=replicas,
        timeout=timedelta(seconds=20),
    )


def save(tier: LocalTier, tensor: torch.Tensor, step: int = 10) -> int:
    return tier.save(step=step, tensors={"w": tensor}, layouts={"w": tensor_layout(tensor)}, manifest={})


def upstream_of(directory: Path) -> LocalCheckpointManager:
    return LocalCheckpointManager(directory, "run")


def send_both_ways(rank: int) -> list:
    sent = []
    for group in (GroupWrapper(), CpuGroup()):
        try:
            if rank == 0:
                group.isend_state_dict(state_of(0), 1)
            else:
                received, _ = group.irecv_state_dict(0)
                sent.append(torch.equal(next(iter(received.tensors)), as_bytes(torch.ones(1000))))
        except (AssertionError, RuntimeError) as error:
            sent.append(type(error).__name__)
    return sent


@pytest.mark.skipif(torch.cuda.is_available(), reason="upstream's way works between GPUs")
def test_upstream_sends_a_copy_back_only_between_gpus_ours_on_cpu(run_ranks):
    _, received = run_ranks(send_both_ways)
    assert received[0] in ("AssertionError", "RuntimeError")
    assert received[1] is True


def replicate_sharded(rank: int) -> list:
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.arange(10.0), mesh, [Shard(0)])
    group = dist.new_group()
    state = state_of(rank)
    state.insert_tensors([sharded])
    with pytest.raises(NotImplementedError, match="does not have a sharding strategy"):
        CliqueReplicationStrategy(group).replicate(state, "id")
    states, _ = CliqueReplicationStrategy(CpuGroup(group)).replicate(state_of(rank, local_part(sharded)), "id")
    return [next(iter(one.tensors)).view(torch.float32).tolist() for one in states]


def test_a_dtensor_can_not_be_replicated_its_local_part_can(run_ranks):
    assert run_ranks(replicate_sharded)[1] == [[0.0, 1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0, 9.0]]


def test_upstreams_state_dict_takes_no_cpu_tensors():
    with pytest.raises(AssertionError):
        BasicTensorAwareStateDict({"w": torch.ones(3)})


def save_again_after_a_kill(rank: int, directory: Path) -> bool:
    upstream = upstream_of(directory / "upstream")
    upstream._ensure_dir()
    upstream._local_ckpt_path_from_id((10, rank, "run"), is_dirty=True).write_bytes(b"half")
    with pytest.raises(SameMachineReplicationException):
        upstream.save(state_of(rank), 10)
    tier = tier_of(rank, directory / "ours")
    save(tier, torch.ones(1000))
    (file,) = (directory / "ours" / "run" / str(rank)).iterdir()
    file.rename(file.with_name(file.name + ".dirty"))
    dist.barrier()
    tier = tier_of(rank, directory / "ours")
    removed = list((directory / "ours" / "run" / str(rank)).iterdir()) == []
    save(tier, torch.ones(1000))
    return removed and len(list((directory / "ours" / "run" / str(rank)).iterdir())) == 1


def test_upstream_can_not_save_a_step_again_whose_half_file_is_there_ours_removes_it(run_ranks, tmp_path):
    assert run_ranks(save_again_after_a_kill, tmp_path) == [True, True]


def move(rank: int, directory: Path) -> list:
    upstream_of(directory / f"node-{rank}").save(state_of(rank), 10)
    save(tier_of(rank, directory / f"node-{rank}"), torch.ones(1000))
    elsewhere = directory / f"node-{1 - rank}"
    return [upstream_of(elsewhere).find_latest(), sorted(tier_of(rank, elsewhere).restorable_steps())]


def test_upstream_does_not_see_the_files_of_a_rank_that_moved_ours_does(run_ranks, tmp_path):
    assert run_ranks(move, tmp_path) == [[-1, [10]]] * 2


def load_flipped(rank: int, directory: Path) -> list:
    upstream = upstream_of(directory / "upstream")
    upstream.save(state_of(rank, torch.full((1000,), 3.0)), 10)
    tier = tier_of(rank, directory / "ours")
    save(tier, torch.full((1000,), 3.0))
    if rank == 1:
        value = torch.full((1000,), 3.0).numpy().tobytes()
        for file in [*upstream.local_ckpt_dir.iterdir(), *(directory / "ours" / "run" / "1").iterdir()]:
            data = bytearray(file.read_bytes())
            data[data.index(value) + 2003] ^= 0x40
            file.write_bytes(data)
    dist.barrier()
    upstream.find_latest()
    loaded, _ = upstream.load()
    wrong = [v for v in next(iter(loaded.tensors)).view(torch.float32).tolist() if v != 3.0]
    with pytest.raises(LocalCheckpointError, match="run/1/step-00000010.*its bytes are not those that were written"):
        tier.load(10)
    return wrong


def test_upstream_loads_flipped_bits_ours_refuses_them_on_every_rank(run_ranks, tmp_path):
    healthy, damaged = run_ranks(load_flipped, tmp_path)
    assert healthy == []
    assert len(damaged) == 1


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def load_trap(rank: int, directory: Path) -> bool:
    upstream = upstream_of(directory / "upstream")
    upstream.save(state_of(rank), 10)
    trap = directory / f"sprung-{rank}"
    (file,) = upstream.local_ckpt_dir.iterdir()
    torch.save(Trap(trap), file)
    upstream.find_latest()
    with pytest.raises(AttributeError):
        upstream.load()
    sprung = trap.exists()
    trap.unlink()
    tier = tier_of(rank, directory / "ours")
    save(tier, torch.ones(1000))
    (file,) = (directory / "ours" / "run" / str(rank)).iterdir()
    torch.save(Trap(trap), file)
    dist.barrier()
    assert tier.restorable_steps() == frozenset()
    return sprung and not trap.exists()


def test_upstream_runs_what_a_file_contains_ours_runs_nothing(run_ranks, tmp_path):
    assert run_ranks(load_trap, tmp_path) == [True, True]


def load_cut_off(rank: int, directory: Path) -> list[str]:
    upstream = upstream_of(directory / "upstream")
    upstream.save(state_of(rank), 10)
    tier = tier_of(rank, directory / "ours")
    save(tier, torch.ones(1000))
    if rank == 1:
        for file in [*upstream.local_ckpt_dir.iterdir(), *(directory / "ours" / "run" / "1").iterdir()]:
            file.write_bytes(file.read_bytes()[:-200])
    dist.barrier()
    outcomes = []
    upstream.find_latest()
    for load in (upstream.load, lambda: tier.load(10)):
        try:
            load()
            outcomes.append("loaded")
        except (OSError, RuntimeError) as error:  # ours is a RuntimeError
            outcomes.append(str(error))
    return outcomes


def test_upstream_lets_ranks_part_over_a_cut_off_file_ours_stay_together(run_ranks, tmp_path):
    (upstream_0, ours_0), (upstream_1, ours_1) = run_ranks(load_cut_off, tmp_path)
    assert upstream_0 == "loaded"
    assert upstream_1 != "loaded"
    assert ours_0 == ours_1 != "loaded"


def save_a_late_step_and_a_view(rank: int, directory: Path) -> list[int]:
    upstream = upstream_of(directory / "upstream")
    with pytest.raises(AssertionError):
        upstream.save(state_of(rank), 10_000_000)
    buffer = torch.zeros(1_000_000)
    upstream.save(state_of(rank, buffer[:1000]), 10)
    (file,) = (path for path in upstream.local_ckpt_dir.iterdir() if "dirty" not in path.name)
    tier = tier_of(rank, directory / "ours")
    size = save(tier, buffer[:1000], step=10_000_000)
    assert tier.restorable_steps() == {10_000_000}
    return [file.stat().st_size, size]


def test_upstream_fails_at_ten_million_steps_and_writes_the_whole_buffer_behind_a_shard(run_ranks, tmp_path):
    for upstream, ours in run_ranks(save_a_late_step_and_a_view, tmp_path):
        assert upstream > 4_000_000
        assert ours < 6_000


def default_group_use(rank: int, directory: Path) -> list[list[str]]:
    """Which groups a save and a search use: None is the default one, where the training's own traffic goes."""
    used: list[list] = []
    originals = dist.barrier, dist.all_gather_object
    tier = tier_of(rank, directory / "ours", replicas=1)
    upstream = upstream_of(directory / "upstream")

    def watched(operation):
        def run(*arguments, **keywords):
            used[-1].append("default" if keywords.get("group") is None else "own")
            return operation(*arguments, **keywords)

        return run

    dist.barrier, dist.all_gather_object = watched(dist.barrier), watched(dist.all_gather_object)
    try:
        used.append([])
        upstream.save(state_of(rank), 10)
        used.append([])
        save(tier, torch.ones(1000))
        tier.restorable_steps()
        tier.load(10)
    finally:
        dist.barrier, dist.all_gather_object = originals
    return [sorted(set(names)) for names in used]


def test_upstream_saves_over_the_default_group_ours_over_its_own(run_ranks, tmp_path):
    assert run_ranks(default_group_use, tmp_path) == [[["default"], ["own"]]] * 2
