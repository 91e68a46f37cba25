"""The local tier with real ranks over gloo and real files: what it gives back, and from where."""

import resource
import shutil
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from training.checkpoint import local_exchange, local_file
from training.checkpoint.layout import tensor_layout
from training.checkpoint.local import LocalCheckpointError, LocalTier

MANIFEST = {"loss": 1.5, "identity": {"seed": 3}}


def shards_of(rank: int, step: int) -> dict[str, torch.Tensor]:
    """Different on every rank and step, with the odd ones: a scalar, an empty shard, narrow and wide elements."""
    value = step * 10 + rank
    return {
        "model.weight": torch.full((50, 3 + rank), value, dtype=torch.float32),
        "model.narrow": torch.full((7,), value, dtype=torch.bfloat16),
        "optimizer.step": torch.tensor(value, dtype=torch.int64),
        "empty": torch.empty((0, 4)),
        "random": torch.full((5,), value % 256, dtype=torch.uint8),
    }


def node_of(root: Path, node: int) -> Path:
    return root / f"node-{node}"


class Rank:
    """One rank's tier; `nodes` says on which node's directory each rank starts."""

    def __init__(
        self, rank: int, root: Path, nodes: list[int], *, replicas: int = 1, ranks_per_node: int = 1, **other
    ) -> None:
        self.rank = rank
        self.tier = LocalTier(
            directory=node_of(root, nodes[rank]),
            rank=rank,
            world_size=len(nodes),
            ranks_per_node=ranks_per_node,
            replicas=replicas,
            **{"session": "run", "timeout": timedelta(seconds=20), **other},
        )

    def save(self, step: int, /, **changes) -> int:
        tensors = shards_of(self.rank, step)
        layouts = {name: tensor_layout(tensor) for name, tensor in tensors.items()}
        arguments = {"step": step, "tensors": tensors, "layouts": layouts, "manifest": {"step": step, **MANIFEST}}
        return self.tier.save(**{**arguments, **changes})

    def load(self, step: int) -> bool:
        """Load and compare with what was saved, to the bit."""
        tensors, layouts, manifest = self.tier.load(step)
        wanted = shards_of(self.rank, step)
        assert manifest == {"step": step, **MANIFEST}
        assert tensors.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert tensors[name].dtype == tensor.dtype
            assert torch.equal(tensors[name], tensor), name
            assert layouts[name] == tensor_layout(tensor)
        return True


def saved(rank: int, root: Path, nodes: list[int], steps: list[int], options: dict) -> int:
    one = Rank(rank, root, nodes, **options)
    return [one.save(step) for step in steps][-1]


def restored(rank: int, root: Path, nodes: list[int], options: dict) -> list:
    """The steps on offer, and the newest loaded and compared."""
    one = Rank(rank, root, nodes, **options)
    steps = one.tier.restorable_steps()
    return [sorted(steps), bool(steps) and one.load(max(steps)), one.tier.refused]


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("step-*") if path.is_file())


def flip_bit(path: Path, offset: int = -100) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


SHAPES = [
    pytest.param([0, 0], 1, 0, id="two ranks in one directory, no copies"),
    pytest.param([0, 1], 1, 1, id="two nodes of one rank"),
    pytest.param([0, 0], 1, 1, id="two nodes that share a directory"),
    pytest.param([0, 0, 1, 1], 2, 1, id="two nodes of two ranks"),
    pytest.param([0, 1, 2, 3], 1, 1, id="four nodes of one rank"),
    pytest.param([0, 0, 0, 0], 2, 1, id="four ranks in one directory"),
]


@pytest.mark.parametrize(("nodes", "ranks_per_node", "replicas"), SHAPES)
def test_what_was_saved_is_there_after_every_process_has_ended(run_ranks, tmp_path, nodes, ranks_per_node, replicas):
    options = {"ranks_per_node": ranks_per_node, "replicas": replicas}
    written = run_ranks(saved, tmp_path, nodes, [10, 20], options, world_size=len(nodes))
    files = files_in(tmp_path)
    assert len(files) == len(nodes) * (1 + replicas)  # only step 20: the older one went when it was complete
    assert sum(written) == sum(path.stat().st_size for path in files)
    assert run_ranks(restored, tmp_path, nodes, options, world_size=len(nodes)) == [[[20], True, ()]] * len(nodes)


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [([0, 1], 1), ([0, 0, 1, 1], 2)])
def test_a_lost_node_is_restored_from_its_peer_and_gets_its_files_again(
    run_ranks, tmp_path, lost, nodes, ranks_per_node
):
    options = {"ranks_per_node": ranks_per_node}
    run_ranks(saved, tmp_path, nodes, [10], options, world_size=len(nodes))
    shutil.rmtree(node_of(tmp_path, lost))
    assert run_ranks(restored, tmp_path, nodes, options, world_size=len(nodes)) == [[[10], True, ()]] * len(nodes)
    run_ranks(saved, tmp_path, nodes, [20], options, world_size=len(nodes))
    shutil.rmtree(node_of(tmp_path, 1 - lost))
    assert run_ranks(restored, tmp_path, nodes, options, world_size=len(nodes)) == [[[20], True, ()]] * len(nodes)


def test_without_copies_a_lost_node_leaves_nothing_to_restore(run_ranks, tmp_path):
    options = {"replicas": 0}
    run_ranks(saved, tmp_path, [0, 1], [10], options)
    shutil.rmtree(node_of(tmp_path, 1))
    assert run_ranks(restored, tmp_path, [0, 1], options) == [[[], False, ()]] * 2


@pytest.mark.parametrize("replicas", [0, 1])
@pytest.mark.parametrize(
    ("before", "after", "ranks_per_node"),
    [([0, 1], [1, 0], 1), ([0, 0, 1, 1], [1, 1, 0, 0], 2), ([0, 1, 2, 3], [2, 0, 3, 1], 1)],
)
def test_a_rank_that_moved_gets_its_shards_from_where_it_was(
    run_ranks, tmp_path, before, after, ranks_per_node, replicas
):
    options = {"ranks_per_node": ranks_per_node, "replicas": replicas}
    run_ranks(saved, tmp_path, before, [10], options, world_size=len(before))
    everyone = [[[10], True, ()]] * len(before)
    assert run_ranks(restored, tmp_path, after, options, world_size=len(before)) == everyone
    run_ranks(saved, tmp_path, after, [20], options, world_size=len(before))
    # Nothing is left of the ranks that moved away: each node has room for its own.
    assert len(files_in(tmp_path)) == len(before) * (1 + replicas)


def test_a_spare_takes_a_lost_nodes_place_while_the_other_ranks_move(run_ranks, tmp_path):
    run_ranks(saved, tmp_path, [0, 1, 2, 3], [10], {}, world_size=4)
    shutil.rmtree(node_of(tmp_path, 1))
    assert run_ranks(restored, tmp_path, [0, 2, 3, 4], {}, world_size=4) == [[[10], True, ()]] * 4


def remove_files_of(root: Path, step: int, rank: int) -> None:
    for path in files_in(root):
        if path.name.startswith(f"step-{step:08d}") and path.name.endswith(f"rank-{rank}"):
            path.unlink()


def two_steps(rank: int, root: Path, nodes: list[int], keep: Path, options: dict) -> None:
    """Step 10 and 20 both on the disk, as after a kill before the older one was removed."""
    one = Rank(rank, root, nodes, **options)
    one.save(10)
    if rank == 0:
        shutil.copytree(root, keep)
    one.save(20)
    if rank == 0:
        shutil.copytree(keep, root, dirs_exist_ok=True)


def test_a_step_that_only_some_ranks_have_is_not_on_offer(run_ranks, tmp_path):
    root = tmp_path / "disks"
    run_ranks(two_steps, root, [0, 1], tmp_path / "keep", {})
    assert run_ranks(restored, root, [0, 1], {}) == [[[10, 20], True, ()]] * 2
    remove_files_of(root, 20, 1)
    assert run_ranks(restored, root, [0, 1], {}) == [[[10], True, ()]] * 2


def load_different_steps(rank: int, root: Path) -> str:
    one = Rank(rank, root, [0, 1])
    with pytest.raises(LocalCheckpointError) as error:
        one.tier.load(20 if rank else 10)
    return str(error.value)


def test_ranks_that_would_load_different_steps_load_nothing(run_ranks, tmp_path):
    root = tmp_path / "disks"
    run_ranks(two_steps, root, [0, 1], tmp_path / "keep", {})
    assert run_ranks(load_different_steps, root) == ["the ranks would load different steps: [10, 20]"] * 2


def step_saved_twice(rank: int, root: Path, nodes: list[int], keep: Path) -> list:
    """Rank 0's files of the second save of step 20 and rank 1's of the first, as after a kill in between."""
    one = Rank(rank, root, nodes, replicas=0)
    one.save(20)
    if rank == 1:
        shutil.copytree(node_of(root, 1), keep)
    one.save(20)
    if rank == 1:
        shutil.rmtree(node_of(root, 1))
        shutil.copytree(keep, node_of(root, 1))
    dist.barrier()
    return sorted(one.tier.restorable_steps())


def test_shards_of_two_saves_of_one_step_are_never_mixed(run_ranks, tmp_path):
    assert run_ranks(step_saved_twice, tmp_path / "disks", [0, 1], tmp_path / "keep") == [[], []]


def begin_a_save(rank: int, root: Path) -> None:
    one = Rank(rank, root, [0, 1])
    with pytest.raises(LocalCheckpointError, match="different steps"):
        one.save(30 + rank)


def test_what_earlier_attempts_did_not_complete_is_removed_when_the_next_save_begins(run_ranks, tmp_path):
    root = tmp_path / "disks"
    run_ranks(two_steps, root, [0, 1], tmp_path / "keep", {})
    remove_files_of(root, 20, 1)
    run_ranks(begin_a_save, root)  # and comes to nothing: the newest complete step is still there, and only that
    assert {path.name[:13] for path in files_in(root)} == {"step-00000010"}
    assert run_ranks(restored, root, [0, 1], {}) == [[[10], True, ()]] * 2


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-50])


def cut_to_nothing(path: Path) -> None:
    path.write_bytes(b"")


def flip_header(path: Path) -> None:
    flip_bit(path, 60)


DAMAGES = [truncate, cut_to_nothing, flip_header, flip_bit]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("nodes", [[0, 1], [0, 0]], ids=["own disks", "one disk"])
def test_a_damaged_file_is_replaced_by_the_copy_and_named(run_ranks, tmp_path, damage, nodes):
    run_ranks(saved, tmp_path, nodes, [10], {})
    own = next(node_of(tmp_path, nodes[1]).glob("run/1/*.rank-1"))
    damage(own)
    for steps, equal, refused in run_ranks(restored, tmp_path, nodes, {}):
        assert (steps, equal) == ([10], True)
        assert len(refused) == 1
        assert str(own) in refused[0]


def failing_load(rank: int, root: Path, nodes: list[int], step: int, options: dict) -> str:
    one = Rank(rank, root, nodes, **options)
    with pytest.raises(LocalCheckpointError) as error:
        one.load(step)
    # The tier is still good: the ranks left the load together.
    one.save(step + 1)
    assert one.load(step + 1)
    return str(error.value)


@pytest.mark.parametrize("damage", DAMAGES)
def test_with_the_copy_damaged_too_every_rank_gets_the_same_error_with_both_files(run_ranks, tmp_path, damage):
    run_ranks(saved, tmp_path, [0, 1], [10], {})
    of_rank_1 = [path for path in files_in(tmp_path) if path.name.endswith("rank-1")]
    for path in of_rank_1:
        damage(path)
    messages = run_ranks(failing_load, tmp_path, [0, 1], 10, {})
    assert messages[0] == messages[1]
    assert "step 10" in messages[0]
    assert all(str(path) in messages[0] for path in of_rank_1)


def test_a_damaged_copy_does_no_harm_while_the_own_file_is_intact(run_ranks, tmp_path):
    run_ranks(saved, tmp_path, [0, 1], [10], {})
    flip_bit(next(node_of(tmp_path, 0).glob("run/0/*.rank-1")))
    assert run_ranks(restored, tmp_path, [0, 1], {}) == [[[10], True, ()]] * 2


def test_files_of_another_session_or_world_size_are_refused(run_ranks, tmp_path):
    run_ranks(saved, tmp_path, [0, 1, 2, 3], [10], {}, world_size=4)
    for steps, _, refused in run_ranks(restored, tmp_path, [0, 1], {}):
        assert steps == []
        assert all("4 ranks, not of 'run' with 2" in reason for reason in refused)
    assert run_ranks(restored, tmp_path, [0, 1], {"session": "other"}) == [[[], False, ()]] * 2
    # Copied by hand under the other session's name: the header knows better.
    for node in range(4):
        (node_of(tmp_path, node) / "run").rename(node_of(tmp_path, node) / "stolen")
    for steps, _, refused in run_ranks(restored, tmp_path, [0, 1, 2, 3], {"session": "stolen"}, world_size=4):
        assert steps == []
        assert "session 'run'" in refused[0]


def load_with_another_layout(rank: int, root: Path) -> str:
    one = Rank(rank, root, [0, 1])
    expected = {name: tensor_layout(tensor) for name, tensor in shards_of(rank, 10).items()}
    one.tier.load(10, expected=expected)
    if rank == 1:  # one rank alone has changed
        expected["model.weight"] = replace(expected["model.weight"], placements=("S(1)",), mesh_shape=(2,))
    with pytest.raises(LocalCheckpointError) as error:
        one.tier.load(10, expected=expected)
    return str(error.value)


def test_another_layout_is_refused_by_every_rank(run_ranks, tmp_path):
    run_ranks(saved, tmp_path, [0, 1], [10], {})
    messages = run_ranks(load_with_another_layout, tmp_path)
    assert messages[0] == messages[1]
    assert "rank 1: model.weight was saved as" in messages[0]


def load_into(rank: int, root: Path, nodes: list[int]) -> list:
    one = Rank(rank, root, nodes)
    room = {name: torch.zeros_like(tensor) for name, tensor in shards_of(rank, 10).items()}
    before = {name: tensor.data_ptr() for name, tensor in room.items()}
    tensors, layouts, _ = one.tier.load(10, into=room)
    assert {name: tensor.data_ptr() for name, tensor in tensors.items()} == before
    assert layouts == {name: tensor_layout(tensor) for name, tensor in room.items()}
    assert all(torch.equal(room[name], wanted) for name, wanted in shards_of(rank, 10).items())
    messages = []
    weight = room["model.weight"]
    for wrong in (
        {**room, "model.weight": weight.double()},
        {**room, "model.weight": torch.empty(weight.shape[::-1]).T},
        {name: tensor for name, tensor in room.items() if name != "empty"},
    ):
        with pytest.raises(LocalCheckpointError) as error:
            one.tier.load(10, into=wrong if rank == 1 else room)
        messages.append(str(error.value))
    assert one.load(10)
    return messages


def nothing(root: Path) -> None:
    pass


def lose_node_1(root: Path) -> None:
    shutil.rmtree(node_of(root, 1))


def damage_own_of_rank_1(root: Path) -> None:
    flip_bit(next(node_of(root, 1).glob("run/1/*.rank-1")))


@pytest.mark.parametrize("mishap", [nothing, lose_node_1, damage_own_of_rank_1])
def test_shards_are_read_into_given_memory_from_file_or_peer(run_ranks, tmp_path, mishap, monkeypatch):
    # Many chunks and messages, as with shards of many GB.
    monkeypatch.setattr(local_file, "_READ_CHUNK", 64)
    monkeypatch.setattr(local_file, "_WRITE_CHUNK", 100)
    monkeypatch.setattr(local_exchange, "_MESSAGE_BYTES", 90)
    run_ranks(saved, tmp_path, [0, 1], [10], {})
    mishap(tmp_path)
    first, second = run_ranks(load_into, tmp_path, [0, 1])
    assert first == second
    for message, part in zip(first, ["torch.float64", "not contiguous", "given alone: empty"], strict=True):
        assert part in message


def refuse_arguments(rank: int, root: Path) -> list[str]:
    one = Rank(rank, root, [0, 1])
    one.save(5)
    layouts = {name: tensor_layout(tensor) for name, tensor in shards_of(rank, 10).items()}
    wrong = {**layouts, "empty": replace(layouts["empty"], local_shape=(1, 4))}
    messages = []
    for changes in (
        {"step": 10 + rank},
        {"manifest": {"path": Path()}} if rank else {},
        {"layouts": wrong} if rank else {},
        {"layouts": {}} if rank else {},
        {"tensors": {**shards_of(rank, 10), "empty": torch.empty((0, 4), device="meta")}},
    ):
        with pytest.raises(LocalCheckpointError) as error:
            one.save(10, **changes)
        messages.append(str(error.value))
    assert one.load(5)  # what was there stays
    return messages


def test_arguments_that_do_not_fit_are_refused_by_every_rank_alike(run_ranks, tmp_path):
    first, second = run_ranks(refuse_arguments, tmp_path)
    assert [text.replace("step 10", "") for text in first[1:]] == [text.replace("step 10", "") for text in second[1:]]
    assert "different steps: [10, 11]" in first[0]
    for message, part in zip(
        first[1:],
        ["rank 1: the manifest can't", "rank 1: empty is", "rank 1: tensors and layouts", "not plain CPU"],
        strict=True,
    ):
        assert part in message


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"world_size": 3}, "even number of nodes"),
        ({"world_size": 6, "ranks_per_node": 2}, "even number of nodes"),
        ({"world_size": 2, "ranks_per_node": 2}, "1 node (2 ranks, 2 per node)"),
        ({"world_size": 5, "ranks_per_node": 2, "replicas": 0}, "use a multiple"),
        ({"replicas": 2}, "0 (own node only) or 1"),
        ({"session": "../x"}, "a name of letters"),
        ({"session": ""}, "a name of letters"),
    ],
)
def test_a_shape_that_does_not_fit_is_one_clear_line_before_anything_is_touched(tmp_path, changes, rule):
    arguments = {"session": "run", "world_size": 2, "ranks_per_node": 1, "replicas": 1, **changes}
    with pytest.raises(ValueError, match=rule.replace("(", r"\(").replace(")", r"\)")) as error:
        LocalTier(directory=tmp_path / "local", rank=0, **arguments)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def start_in_a_file(rank: int, root: Path) -> str:
    if rank == 1:
        root.mkdir()
        node_of(root, 1).write_text("not a directory")
    dist.barrier()
    with pytest.raises(LocalCheckpointError) as error:
        Rank(rank, root, [0, 1])
    return str(error.value)


def test_a_directory_that_can_not_be_used_is_named_on_every_rank_at_the_start(run_ranks, tmp_path):
    messages = run_ranks(start_in_a_file, tmp_path / "disks")
    assert messages[0] == messages[1]
    assert messages[0].startswith("rank 1: ")
    assert "node-1 can't be used for local checkpoints: Not a directory" in messages[0]


def cleared_disk(rank: int, root: Path) -> bool:
    one = Rank(rank, root, [0, 1])
    one.save(10)
    if rank == 1:
        shutil.rmtree(node_of(root, 1))
    dist.barrier()
    assert one.load(10)
    one.save(20)
    return one.load(20) and len(files_in(node_of(root, 1))) == 2


def test_a_disk_that_was_cleared_during_the_run_is_used_again(run_ranks, tmp_path):
    assert run_ranks(cleared_disk, tmp_path) == [True, True]


def in_background_while_training(rank: int, root: Path) -> bool:
    """Saves in a thread while the main thread keeps the default group busy."""
    import threading

    one = Rank(rank, root, [0, 1])
    errors = []

    def save() -> None:
        try:
            for step in range(1, 21):
                one.save(step)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=save)
    thread.start()
    value = torch.ones(1000)
    for _ in range(300):
        dist.all_reduce(value)
        value /= 2
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert not errors
    assert torch.equal(value, torch.ones(1000))
    return one.load(20)


def test_saving_in_a_thread_and_training_do_not_disturb_each_other(run_ranks, tmp_path):
    assert run_ranks(in_background_while_training, tmp_path) == [True, True]


def silent_peer(rank: int, root: Path) -> list:
    one = Rank(rank, root, [0, 1], timeout=timedelta(seconds=2))
    one.save(5)
    if rank == 1:
        time.sleep(5)
        return []
    started = time.monotonic()
    with pytest.raises(LocalCheckpointError, match="did not answer within 2 s"):
        one.save(10)
    waited = time.monotonic() - started
    with pytest.raises(LocalCheckpointError, match="has ended"):
        one.tier.restorable_steps()
    return [waited]


def test_a_silent_peer_ends_a_save_within_the_timeout_and_keeps_the_step_before(run_ranks, tmp_path):
    waited = run_ranks(silent_peer, tmp_path)[0][0]
    assert waited < 30
    assert run_ranks(restored, tmp_path, [0, 1], {}) == [[[5], True, ()]] * 2


def many_saves(rank: int, root: Path) -> list:
    one = Rank(rank, root, [0, 1])
    big = {f"w{i}": torch.full((1_000_000,), float(rank)) for i in range(4)}
    layouts = {name: tensor_layout(tensor) for name, tensor in big.items()}
    process = psutil.Process()
    seen = []
    for step in range(1, 101):
        one.tier.save(step=step, tensors=big, layouts=layouts, manifest={})
        if step in (20, 100):
            seen.append((process.memory_info().rss, process.num_fds(), process.num_threads()))
    return seen


def test_memory_descriptors_and_files_stay_flat_over_100_saves(run_ranks, tmp_path):
    for (early, early_fds, early_threads), (late, late_fds, late_threads) in run_ranks(many_saves, tmp_path):
        assert late - early < 16_000_000  # one save's shards
        assert late_fds <= early_fds + 2  # two may be open at the instant of a look
        assert late_threads <= early_threads
    assert len(files_in(tmp_path)) == 4


def load_equal_shapes(rank: int, root: Path) -> list[float]:
    one = Rank(rank, root, [0, 1])
    tensor = torch.full((1000,), float(rank))
    one.save(10, tensors={"w": tensor}, layouts={"w": tensor_layout(tensor)})
    if rank == 1:
        shutil.rmtree(node_of(root, 1))
    dist.barrier()
    tensors, _, _ = one.tier.load(10, into={"w": torch.full((1000,), -1.0)})
    return tensors["w"].unique().tolist()


def test_what_a_rank_reads_for_another_does_not_end_up_in_its_own_memory(run_ranks, tmp_path):
    assert run_ranks(load_equal_shapes, tmp_path) == [[0.0], [1.0]]


def receive_damaged(rank: int, root: Path) -> str:
    one = Rank(rank, root, [0, 1])
    receive = dist.recv

    def flipped(message: torch.Tensor, *arguments, **keywords) -> int:
        sender = receive(message, *arguments, **keywords)
        message[0] ^= 1
        return sender

    dist.recv = flipped
    try:
        with pytest.raises(LocalCheckpointError) as error:
            one.tier.load(10)
    finally:
        dist.recv = receive
    return str(error.value)


def test_shards_that_change_on_the_way_from_a_peer_are_refused_by_every_rank(run_ranks, tmp_path):
    run_ranks(saved, tmp_path, [0, 1], [10], {})
    lose_node_1(tmp_path)
    messages = run_ranks(receive_damaged, tmp_path)
    assert messages[0] == messages[1]
    assert "rank 1: what another rank sent did not arrive" in messages[0]


def page_faults(rank: int, root: Path) -> int:
    one = Rank(rank, root, [0, 1])
    tensor = torch.ones(16_000_000)  # 64 MB: malloc gives such memory back at once, and gets it anew
    for step in range(1, 6):
        one.save(step, tensors={"w": tensor}, layouts={"w": tensor_layout(tensor)})
        if step == 2:
            warm = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - warm


def test_a_peers_copy_is_received_into_memory_that_is_used_again(run_ranks, tmp_path):
    pages = 64_000_000 // resource.getpagesize()
    assert all(faults < pages for faults in run_ranks(page_faults, tmp_path))  # of three saves


def next_attempt(rank: int, root: Path) -> bool:
    """As an in-process restart does it: the default group goes, and all others with it, then comes anew."""
    for attempt in range(1, 4):
        one = Rank(rank, root, [0, 1])
        one.save(attempt)
        dist.destroy_process_group()
        one.tier.close()
        one.tier.close()
        store = dist.FileStore(str(root / f"store-{attempt}"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        assert Rank(rank, root, [0, 1]).load(attempt)
    return True


def test_a_tier_is_built_anew_after_its_groups_were_destroyed(run_ranks, tmp_path):
    assert run_ranks(next_attempt, tmp_path) == [True, True]


def many_attempts(rank: int, root: Path) -> list[int]:
    process = psutil.Process()
    seen = []
    for attempt in range(12):
        one = Rank(rank, root, [0, 1])
        if attempt:
            assert one.load(attempt)
        one.save(attempt + 1)
        one.tier.close()
        seen.append(process.num_fds())
    return seen


def test_descriptors_stay_flat_over_many_attempts_in_one_process(run_ranks, tmp_path):
    for seen in run_ranks(many_attempts, tmp_path):
        assert seen[-1] <= seen[3]
