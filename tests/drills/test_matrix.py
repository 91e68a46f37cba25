"""The fault matrix: its quick form for real, what its schedules hold, and that a wrong end is told."""

import itertools
import json
import subprocess
import sys
from dataclasses import replace

import pytest

from config.deployment import load
from drills.matrix import (
    ALL,
    Cell,
    Group,
    Setup,
    _Bench,
    _equal,
    full_groups,
    matrix_deployment,
    quick_groups,
    random_groups,
    run_matrix,
)
from drills.run import with_faults
from tests.drills.harness import REPOSITORY
from training.config_faults import CLUSTER_KINDS, GPU_KINDS, FaultKind, FaultSpec, Moment
from training.faults import memory_limit_can_be_set

LOCAL = REPOSITORY / "deployments/local.yaml"


def test_the_quick_matrix_passes(tmp_path):
    command = [sys.executable, "-m", "drills", "matrix", "--quick", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    cells = json.loads((tmp_path / "out/matrix.json").read_text())
    assert len(cells) == sum(len(group.faults) for group in quick_groups())
    healed_by = {cell["layer"] for cell in cells}
    assert healed_by == {"none", "in_process", "in_job"}
    assert "| exception |" in (tmp_path / "out/matrix.md").read_text()


def test_the_full_matrix_has_every_kind_and_every_moment_and_each_group_is_a_valid_run():
    deployment = load(LOCAL)
    groups = list(full_groups())
    kinds = {fault.kind for group in groups for fault in (*group.faults, *group.also)}
    assert kinds | {FaultKind.SLOW} >= set(FaultKind) - set(GPU_KINDS)
    assert {fault.moment for group in groups for fault in group.faults} == set(Moment)
    assert len({(group.name, group.setup) for group in groups}) == len(groups)
    for group in groups:
        with_faults(matrix_deployment(deployment, group.setup), (*group.also, *group.faults))


def test_random_schedules_are_the_same_for_the_same_seed():
    assert list(random_groups(20, 7)) == list(random_groups(20, 7))
    assert list(random_groups(20, 7)) != list(random_groups(20, 8))
    assert {fault.kind for group in random_groups(300, 7) for fault in group.faults} > set(CLUSTER_KINDS)


CELL = Cell(fault="sigkill@4:rank1", kind="sigkill", moment="backward", rank=1, layers="", fired=True, layer="in_job",
            recovery_seconds=5.0, steps_lost=1, recovered=True, bitwise_equal=True, command="")  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "passed"),
    [
        ({}, True),
        ({"bitwise_equal": False}, False),
        ({"recovered": False}, False),
        ({"fired": False, "recovered": False}, False),
        ({"fired": False, "recovered": False, "must_strike": False}, True),
        ({"recovered": False, "must_strike": False}, False),
    ],
)
def test_a_cell_passes_only_when_all_is_well(changes, passed):
    assert replace(CELL, **changes).passed is passed


def test_a_run_that_ends_elsewhere_is_named_and_its_logs_are_kept(tmp_path):
    """Against a reference of another seed, a run that is sound must count as wrong."""
    deployment = load(LOCAL)
    other = deployment.model_copy(update={"train": deployment.train.model_copy(update={"seed": 99})})
    reference = _Bench(other, tmp_path / "other", lambda _: None)
    reference.open()
    bench = _Bench(deployment, tmp_path / "out", lambda _: None)
    bench.open()
    bench._references[()] = reference._reference(())
    (cell,) = bench.run(Group("slow", (FaultSpec(kind="slow", step=4, rank=0, seconds=0.1),)))
    assert not cell.passed
    assert "other final parameters than the undisturbed run" in cell.note
    assert _equal(reference._reference(()), reference._reference(()))


@pytest.mark.skipif(not memory_limit_can_be_set(), reason="no memory cgroup may be made here")
def test_the_kernel_may_run_out_of_memory(tmp_path):
    group = Group("oom", (FaultSpec(kind="out_of_memory", step=4, rank=1),))
    matrix = run_matrix(load(LOCAL), [group], out=tmp_path / "out", say=lambda _: None)
    assert [(cell.layer, cell.passed) for cell in matrix.cells] == [("in_job", True)]


LAYERS = ("in_process", "in_job", "job")


@pytest.mark.parametrize("on", [c for size in range(4) for c in itertools.combinations(LAYERS, size)], ids="+".join)
def test_each_combination_of_layers_heals_by_its_innermost_one_or_fails(tmp_path, on):
    group = Group("exception", (FaultSpec(kind="exception", step=4, rank=1),), Setup(on))
    bench = _Bench(load(LOCAL), tmp_path / "out", lambda _: None)
    bench.open()
    run, problem = bench._analysed(group)
    if on:
        assert run is not None, problem
        assert [fault.layer for fault in run.faults] == [on[0]]
        assert run.problems == ()
    else:
        assert "a launcher ended with exit code 1" in problem
        assert (tmp_path / "out/failed/exception-").is_dir()


def test_all_is_the_usual_setup():
    assert Group("x", ()).setup == ALL
