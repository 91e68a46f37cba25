"""Drills and benchmarks as pairs of jobs: what differs between the two, and where their results are."""

import json
from pathlib import Path

import pytest
import yaml

from k8s import drill
from k8s import main as k8s_main

ROOT = Path(__file__).resolve().parents[2]
LOCAL = str(ROOT / "deployments" / "local.yaml")


def run(*arguments):
    return k8s_main.main(["--deployment", LOCAL, *(str(argument) for argument in arguments)])


def settings(folder):
    """train.json of the job in a folder."""
    (file,) = folder.glob("*.k8s.yaml")
    (config_map,) = [d for d in yaml.safe_load_all(file.read_text()) if d["kind"] == "ConfigMap"]
    return json.loads(config_map["data"]["train.json"])


def differences(one, two):
    return {key for key in one if one[key] != two[key]}


def test_a_drill_is_the_job_with_and_without_its_faults(tmp_path, capsys):
    out = tmp_path / "out"
    assert run("--out", out, "--fault", "exception@25:rank1", "--fault", "sigkill@42:rank0") == 0
    files = capsys.readouterr().out.splitlines()
    assert files == [
        str(out / "local-shared.k8s.yaml"),
        str(out / "reference" / "local-reference.k8s.yaml"),
        str(out / "run" / "local-run.k8s.yaml"),
    ]
    reference, faulted = settings(out / "reference"), settings(out / "run")
    assert reference["faults"] == []
    assert [fault["kind"] for fault in faulted["faults"]] == ["exception", "sigkill"]
    assert differences(reference, faulted) == {"faults", "run_directory", "checkpoint"}
    for name, train in (("reference", reference), ("run", faulted)):
        assert train["run_directory"] == f"/fsx/runs/local-drill/{name}"
        assert train["checkpoint"]["directory"] == f"/fsx/runs/local-drill/{name}/checkpoints"


def test_the_two_runs_share_claim_and_namespace_but_no_object(tmp_path, capsys):
    assert run("--out", tmp_path / "out", "--fault", "exception@25:rank1") == 0
    names = [
        (document["kind"], document["metadata"]["name"])
        for file in capsys.readouterr().out.splitlines()
        for document in yaml.safe_load_all(Path(file).read_text())
    ]
    assert len(set(names)) == len(names)
    assert ("JobSet", "local-reference") in names
    assert ("JobSet", "local-run") in names
    assert len([kind for kind, _ in names if kind == "PersistentVolumeClaim"]) == 1


def test_a_drill_can_be_shorter_than_the_run(tmp_path):
    assert run("--out", tmp_path / "out", "--fault", "exception@5:rank1", "--steps", 4) == 2
    assert run("--out", tmp_path / "out", "--fault", "exception@2:rank1", "--steps", 4) == 0
    train = settings(tmp_path / "out" / "run")
    assert (train["total_steps"], train["schedule"]["warmup_steps"]) == (4, 4)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--fault", "exception@25"], "must be KIND@STEP:rankN"),
        (["--fault", "nap@25:rank0"], "--fault nap@25:rank0: kind"),
        (["--fault", "exception@61:rank0"], "after the last step 60"),
        (["--fault", "exception@5:rank7"], "names a rank that does not exist"),
        (["--steps", "10"], "--steps 10 is for drills and benchmarks"),
        (["--chart", "prepare-data"], "job.prepare_data is not set"),
    ],
)
def test_what_can_not_be_is_one_line(tmp_path, capsys, arguments, problem):
    assert run("--out", tmp_path / "out", *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert problem in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_job_whose_name_is_too_long_for_its_drill_is_refused(changed):
    deployment = changed("local", job={"name": "a" * 44})
    with pytest.raises(ValueError, match="shorten it to 44"):
        drill.fault_drill(deployment, ())


def test_a_folder_of_a_drill_is_replaced_and_one_with_other_files_is_not(tmp_path):
    out = tmp_path / "out"
    assert run("--out", out, "--fault", "exception@25:rank1") == 0
    assert run("--out", out) == 0
    assert sorted(path.name for path in out.iterdir()) == ["0000-local-shared.k8s.yaml", "0001-local.k8s.yaml"]
    assert run("--out", out, "--fault", "exception@25:rank1") == 0
    (out / "run" / "notes.txt").write_text("kept")
    assert run("--out", out) == 2
    assert (out / "run" / "notes.txt").exists()


def test_a_benchmark_is_the_job_with_async_and_with_sync_checkpoints(tmp_path):
    out = tmp_path / "out"
    assert run("--out", out, "--benchmark", "checkpoint", "--steps", "40") == 0
    asynchronous, synchronous = settings(out / "async"), settings(out / "sync")
    assert differences(asynchronous, synchronous) == {"checkpoint", "run_directory"}
    assert differences(asynchronous["checkpoint"], synchronous["checkpoint"]) == {"mode", "directory"}
    assert asynchronous["run_directory"] == "/fsx/runs/local-checkpoint-benchmark/async"
