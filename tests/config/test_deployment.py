"""Rules that hold between the sections of a deployment file."""

from pathlib import Path

import pytest
import yaml

from config.deployment import DeploymentConfig, load

DEPLOYMENTS = Path(__file__).resolve().parents[2] / "deployments"


def changed(tmp_path: Path, name: str, **sections) -> Path:
    document = yaml.safe_load((DEPLOYMENTS / f"{name}.yaml").read_text())
    for section, changes in sections.items():
        document[section] = document.get(section, {}) | changes
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.mark.parametrize("path", sorted(DEPLOYMENTS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_deployment_loads_and_survives_a_round_trip(path):
    deployment = load(path)
    assert deployment.name == path.stem
    assert DeploymentConfig.model_validate_json(deployment.model_dump_json()) == deployment


def test_the_default_is_16_h100_and_a_spare_and_the_local_one_has_the_same_shape():
    default, local = load(DEPLOYMENTS / "p5-2node.yaml"), load(DEPLOYMENTS / "local.yaml")
    assert (default.job.world_size, default.job.pod_count, default.train.model.num_parameters) == (16, 3, 8_030_261_248)
    assert (local.job.node_count, local.job.world_size, local.job.instance) == (2, 2, None)
    assert 1e6 < local.train.model.num_parameters < 1e7


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"job": {"node_count": 3}}, "train: global_batch_size 256 is not a multiple of micro_batch_size 1 x 24 ranks"),
        ({"train": {"run_directory": "/tmp/x"}}, "train.run_directory /tmp/x must lie under /fsx"),
        ({"train": {"data": {"path": "/fsx"}}}, "train.data.path /fsx must lie under /fsx"),
        ({"job": {"instance_type": None, "nproc_per_node": 8}}, "job.instance_type is needed when there is a cluster"),
        ({"cluster": {"vpc_cidr": "10.0.0.0/20"}, "job": {"spare_count": 60}}, "needs 3100 addresses"),
        (
            {
                "cluster": {"capacity": {"kind": "capacity_block", "reservation_id": "cr-0123456789abcdef0"}},
                "job": {"spare_count": 63},
            },
            "is 65, a Capacity Block has 64 instances at most",
        ),
    ],
)
def test_sections_that_contradict_each_other_are_refused_with_the_fix(tmp_path, sections, message):
    with pytest.raises(ValueError, match="p5-2node.yaml: ") as caught:
        load(changed(tmp_path, "p5-2node", **sections))
    assert message in str(caught.value)


def test_a_file_that_is_no_mapping_or_no_yaml_is_one_line(tmp_path):
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ValueError, match="must be a mapping with the keys job, train and optionally cluster"):
        load(tmp_path / "list.yaml")
    (tmp_path / "broken.yaml").write_text("job: [")
    with pytest.raises(ValueError, match="not YAML") as caught:
        load(tmp_path / "broken.yaml")
    assert len(str(caught.value).splitlines()) == 1
