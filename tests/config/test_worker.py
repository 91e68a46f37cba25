"""What a worker asks of its node, and what does not fit."""

from pathlib import Path

import pytest
import yaml

from config.deployment import DeploymentConfig, load
from config.instances import INSTANCE_TYPES
from config.worker import staging_gib, worker_resources

ROOT = Path(__file__).resolve().parents[2]


def deployment(**job):
    document = yaml.safe_load((ROOT / "deployments" / "p5-2node.yaml").read_text())
    del document["cluster"]
    document["job"] |= job
    document["train"]["global_batch_size"] = 16 * 8 * 9
    return DeploymentConfig.model_validate({"name": "p5-2node", **document})


@pytest.mark.parametrize("name", INSTANCE_TYPES)
def test_a_worker_leaves_room_on_its_node(name):
    instance = INSTANCE_TYPES[name]
    found = deployment(instance_type=name, node_count=16, spare_count=0)
    worker = worker_resources(found.job, found.train)
    assert worker.cpu < instance.vcpu_count
    memory_mib = worker.memory_gib * 1024 + worker.huge_pages_mib
    assert memory_mib < instance.memory_mib * 0.9
    assert worker.shm_gib <= worker.memory_gib // 2
    assert worker.nvme_gib * 2**30 < instance.nvme_gb * 1e9
    assert (worker.gpu_count, worker.efa_count) == (instance.gpu_count, instance.efa_count)


def test_staging_shrinks_with_the_number_of_nodes():
    sizes = [staging_gib(found.job, found.train) for found in (deployment(node_count=n) for n in (2, 4, 8))]
    assert sizes == [98, 53, 31]


@pytest.mark.parametrize("shm_gib", [897, 1792, 5000])
def test_shared_memory_above_half_of_the_limit_is_refused(shm_gib):
    assert deployment(shm_gib=896)
    with pytest.raises(ValueError, match=rf"job.shm_gib {shm_gib}: .* memory limit of 1792 GiB.*; lower it"):
        deployment(shm_gib=shm_gib)


def test_a_model_whose_checkpoint_can_not_be_staged_is_refused():
    with pytest.raises(ValueError, match=r"job.shm_gib \d+ \(computed from the model\): .*raise job.node_count"):
        deployment(instance_type="p5.4xlarge", node_count=1, spare_count=0)


def test_half_the_grace_period_is_refused_at_load(tmp_path):
    document = yaml.safe_load((ROOT / "deployments" / "local.yaml").read_text())
    document["job"]["termination_grace_period_seconds"] = 5
    path = tmp_path / "broken.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(ValueError, match="termination_grace_period_seconds 5 must be above") as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_text_to_tokenize_lies_on_the_shared_volume():
    with pytest.raises(ValueError, match="input_directory /data/raw must lie under /fsx"):
        deployment(prepare_data={"input_directory": "/data/raw"})
