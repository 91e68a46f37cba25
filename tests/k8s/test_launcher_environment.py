"""Environment of the ranks: what is set only when it is needed."""

from k8s import launcher


def environment(changed, **train):
    return launcher.worker_environment(changed("p5-2node", train=train))


def test_deterministic_gpu_runs_get_the_workspace_that_cublas_needs(changed):
    assert environment(changed, deterministic=True)["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "CUBLAS_WORKSPACE_CONFIG" not in environment(changed)


def test_nvls_is_off_only_while_in_process_restart_is_on(changed):
    assert environment(changed)["NCCL_NVLS_ENABLE"] == "0"
    assert "NCCL_NVLS_ENABLE" not in environment(changed, restarts={"in_process": {"enabled": False}})
