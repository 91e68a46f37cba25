"""The store inside a worker, with real launchers: the manifest's own arguments, no control process."""

import sysconfig
import time
from pathlib import Path

import pytest
import yaml

from config.deployment import load
from drills.local_cluster import LocalCluster
from drills.run import with_faults
from k8s.drill import parse_fault
from tests.drills.harness import write_deployment
from training import prepare_data
from training.events import read_events


@pytest.mark.timeout(420)
def test_two_launchers_meet_at_index_0_and_heal_a_killed_rank(tmp_path):
    path = write_deployment(tmp_path / "embedded.yaml", total_steps=6)
    document = yaml.safe_load(path.read_text())
    document["job"]["rendezvous"]["mode"] = "embedded"
    path.write_text(yaml.safe_dump(document))
    deployment = with_faults(load(path), (parse_fault("sigkill@5:rank1"),))
    shared = tmp_path / "fsx"
    corpus = shared / deployment.train.data.path.removeprefix("/fsx/")
    prepare_data.prepare(Path(sysconfig.get_paths()["stdlib"]), "*.py", corpus, max_bytes=1_000_000)
    deadline = time.monotonic() + 400
    with LocalCluster(deployment, shared_directory=shared) as cluster:
        while cluster.running() and time.monotonic() < deadline:
            time.sleep(0.2)
            cluster.look()
        exits = {(exit_.node, exit_.exit_code) for exit_ in cluster.exited()}
        assert {log.name for log in cluster.logs.iterdir()} == {"node-0.log", "node-1.log"}
    assert exits == {(0, 0), (1, 0)}
    events = read_events(shared / deployment.train.run_directory.removeprefix("/fsx/"))
    assert [event["rank"] for event in events if event["event"] == "fault"] == [1]
    assert {event["cycle"] for event in events if event["event"] == "complete"} == {1}
