"""Layouts of real FSDP2 shards, and the way through JSON."""

import json

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from training.checkpoint.layout import TensorLayout, local_part, tensor_layout


def layouts_of_fsdp(rank: int, mesh_shape: tuple) -> list:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    model = nn.Linear(4, 5, bias=False)  # five rows over two ranks: uneven
    fully_shard(model, mesh=mesh)
    layout = tensor_layout(model.weight)
    part = local_part(model.weight)
    assert not part.requires_grad
    assert part.data_ptr() == model.weight.to_local().data_ptr()
    assert TensorLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
    return [layout, tuple(part.shape)]


def test_an_fsdp_shard_knows_the_whole_its_part_and_the_mesh(run_ranks):
    answers = run_ranks(layouts_of_fsdp, (2,))
    for (layout, part), rows in zip(answers, (3, 2), strict=True):
        assert layout == TensorLayout("float32", (5, 4), (rows, 4), ("S(0)",), (2,))
        assert part == (rows, 4)
        assert layout.local_bytes == rows * 16


def test_an_hsdp_shard_has_a_placement_for_each_dimension_of_the_mesh(run_ranks):
    for layout, _ in run_ranks(layouts_of_fsdp, (2, 2), world_size=4):
        assert layout.placements == ("R", "S(0)")
        assert layout.mesh_shape == (2, 2)


def test_a_plain_tensor_is_its_own_part():
    tensor = torch.zeros((), dtype=torch.bfloat16)
    assert tensor_layout(tensor) == TensorLayout("bfloat16", (), (), (), ())
    assert tensor_layout(tensor).local_bytes == 2
    assert local_part(tensor).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(
    "change", [{"dtype": "nn"}, {"dtype": "float99"}, {"global_shape": None}, {"local_shape": ["x"]}]
)
def test_what_is_no_layout_is_refused(change):
    value = {**tensor_layout(torch.zeros(3)).to_json(), **change}
    with pytest.raises(ValueError, match="not a tensor layout|invalid literal"):
        TensorLayout.from_json(value)
    with pytest.raises(ValueError, match="not a tensor layout"):
        TensorLayout.from_json({})
