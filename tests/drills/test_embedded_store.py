"""The store inside a worker, with real launchers: the manifest's own arguments, no control process."""

import json

import yaml

from tests.drills.harness import run_drill_cli, write_deployment


def test_two_launchers_meet_at_index_0_and_heal_a_killed_rank(tmp_path):
    path = write_deployment(tmp_path / "embedded.yaml")
    document = yaml.safe_load(path.read_text())
    document["job"]["rendezvous"]["mode"] = "embedded"
    path.write_text(yaml.safe_dump(document))
    done = run_drill_cli(path, tmp_path / "out", "--fault", "sigkill@10:rank1")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["passed"] is True
    assert report["bitwise_equal"] is True
    logs = {path.name for path in (tmp_path / "out" / "run" / "logs").glob("*.log")}
    assert logs == {"node-0.log", "node-1.log"}
