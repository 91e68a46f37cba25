"""The manifests' arguments through the parsers of the pinned NVRx: a renamed flag would end each pod with code 2."""

import pytest

from tests.k8s.shapes import EMBEDDED
from training.supervisor import parse_arguments

pytest.importorskip("nvidia_resiliency_ext")

from nvidia_resiliency_ext.fault_tolerance import control_plane, launcher
from nvidia_resiliency_ext.fault_tolerance.config import FaultToleranceConfig


def supervised(container):
    """The supervisor's options and the command that it runs."""
    arguments = parse_arguments(container["args"])
    return arguments, arguments.command


def test_ft_launcher_accepts_the_workers_arguments(manifests):
    options, (program, *rest) = supervised(manifests.container("worker"))
    assert program == "ft_launcher"
    assert str(options.run_directory) == manifests.deployment.train.run_directory
    arguments = launcher.parse_args(rest)
    assert arguments.module is True
    assert (arguments.training_script, arguments.training_script_args) == (
        "training.train",
        ["--config=/etc/training/train.json"],
    )
    low, high = launcher.parse_min_max_nnodes(arguments.nnodes)
    assert (low, high) == (manifests.deployment.job.node_count, manifests.deployment.job.max_nodes)


def test_nvrx_reads_the_section_timeouts_that_the_deployment_says(manifests):
    _, (_, *rest) = supervised(manifests.container("worker"))
    config, in_job = (
        FaultToleranceConfig.from_args(launcher.parse_args(rest)),
        manifests.deployment.train.restarts.in_job,
    )
    assert config.rank_section_timeouts == {
        "setup": in_job.setup_section_timeout_seconds,
        "step": in_job.step_section_timeout_seconds,
        "checkpointing": in_job.checkpointing_section_timeout_seconds,
    }
    assert config.rank_out_of_section_timeout == in_job.out_of_section_timeout_seconds


def test_ft_launcher_accepts_the_embedded_stores_arguments(render, changed):
    _, (_, _, _, waits, *rest) = supervised(render(changed("p5-2node", job=EMBEDDED)).container("worker"))
    arguments = launcher.parse_args([f"--rdzv-conf=is_host=1,{waits}", *rest])
    assert arguments.training_script == "training.train"
    assert arguments.rdzv_conf.startswith("is_host=1,join_timeout=1800,")


def test_nvrx_control_accepts_its_arguments(manifests):
    _, (program, *rest) = supervised(manifests.container("control"))
    assert program == "nvrx-control"
    arguments = control_plane.parse_args(rest)
    control_plane._validate_args(arguments, FaultToleranceConfig.from_args(arguments))
    assert arguments.rdzv_id == manifests.deployment.job.name


def test_the_parsers_refuse_a_flag_that_is_not_there(manifests):
    _, (_, *rest) = supervised(manifests.container("worker"))
    with pytest.raises(SystemExit) as ended:
        launcher.parse_args(["--ft-restart-policy=min-healthy", *rest])
    assert ended.value.code == 2
