"""FLOPs, MFU and the measurements of a step."""

import pytest

from training import device as devices
from training.config import MODEL_PRESETS, TrainConfig
from training.device import DeviceLimits
from training.metrics import flops_per_token, mfu, step_metrics
from training.step import StepResult

CONFIG = TrainConfig.model_validate(
    {
        "run_name": "t",
        "model": "debug-3m",
        "run_directory": "/none",
        "data": {"path": "/none"},
        "total_steps": 60,
        "seq_len": 128,
        "micro_batch_size": 4,
        "global_batch_size": 8,
        "checkpoint": {"directory": "/none", "interval_steps": 5},
    }
)
RESULT = StepResult(
    loss=2.5,
    grad_norm=0.75,
    learning_rate=1e-3,
    skipped=False,
    stop=None,
    data_seconds=0.01,
    forward_backward_seconds=0.15,
    optimizer_seconds=0.02,
)


def measured(limits: DeviceLimits, **changes):
    arguments = {
        "step": 5,
        "world_size": 2,
        "limits": limits,
        "skipped_steps": 0,
        "memory_peak_bytes": 3 * 2**30,
        "checkpoint_stall_seconds": 0.02,
    }
    return step_metrics(CONFIG, RESULT, **{**arguments, **changes})


def test_flops_count_every_matrix_product_once_forward_and_twice_backward():
    model, seq_len = MODEL_PRESETS["llama-3.1-8b"], 8192
    per_layer = (
        2 * 4096 * (4096 + 1024 + 1024 + 4096 + 3 * 14_336)
    )  # multiply-adds of q, k, v, o and the three of SwiGLU
    scores = 2 * 2 * 4096 * (seq_len + 1) / 2  # scores and their sum, over the positions that a token may see
    forward = 32 * (per_layer + scores) + 2 * 4096 * 128_256

    assert flops_per_token(model, seq_len) == pytest.approx(3 * forward, rel=1e-3)


def test_a_tied_table_counts_as_the_head_that_it_is():
    tied = MODEL_PRESETS["llama-3.2-1b"]
    untied = tied.model_copy(update={"tie_word_embeddings": False})
    assert flops_per_token(tied, 1024) == flops_per_token(untied, 1024)


def test_mfu_is_stated_for_a_known_gpu_only():
    model = MODEL_PRESETS["llama-3.1-8b"]
    h100 = DeviceLimits("NVIDIA H100 80GB HBM3", devices.peak_flops("NVIDIA H100 80GB HBM3"), 80 * 2**30)
    tokens_per_second = 0.4 * 989e12 / flops_per_token(model, 8192)
    assert mfu(model, 8192, tokens_per_second, h100) == pytest.approx(0.4)
    assert mfu(model, 8192, tokens_per_second, DeviceLimits("CPU", None, None)) is None


def test_the_peak_is_that_of_the_longest_matching_name():
    assert devices.peak_flops("NVIDIA H100 PCIe") == 756e12
    assert devices.peak_flops("NVIDIA H200") == 989e12
    assert devices.peak_flops("NVIDIA L40S") == 362e12
    assert devices.peak_flops("Some GPU") is None


def test_tokens_per_second_are_those_of_all_ranks_over_the_whole_step():
    metrics = measured(DeviceLimits("CPU", None, None))
    assert metrics.step_seconds == pytest.approx(0.2)
    assert metrics.tokens_per_second == pytest.approx(8 * 128 / 0.2)
    assert "mfu" not in metrics.scalars()
    assert metrics.scalars()["checkpoint_stall_seconds"] == 0.02


def test_the_human_line_says_it_all():
    limits = DeviceLimits("GPU", 1e12, 2**34)
    assert measured(limits, skipped_steps=2).line(60) == (
        "step 5/60  loss 2.5000  norm 0.75  lr 1.00e-03  5,120 tok/s  "
        f"MFU {mfu(CONFIG.model, 128, 2560, limits):.1%}  3.00 GiB  "
        "0.200 s (data 5% fwd+bwd 75% optimizer 10% checkpoint 10%)  skipped 2"
    )
    assert "MFU" not in measured(DeviceLimits("CPU", None, None)).line(60)
