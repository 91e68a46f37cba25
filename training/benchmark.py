"""Speed and memory of the model and of the training step on this machine, beside the device's limits.

`python -m training.benchmark [--model llama-3.2-1b] [--seq-len 8192] ...` on one GPU or the CPU; with
`torchrun --nproc-per-node=8 -m training.benchmark ...` on all GPUs of a host. Random tokens, no checkpoints.
"""

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError

from training import device as devices
from training.config import MODEL_PRESETS, TrainConfig, describe_errors
from training.device import DeviceLimits
from training.metrics import flops_per_token, mfu
from training.optimizer import build_optimizer
from training.parallelism import build_mesh, build_sharded_model, check_device
from training.step import TrainStep


@dataclass(frozen=True)
class Measured:
    """One benchmark: medians of its repetitions, per rank."""

    name: str
    seconds: float
    tokens_per_second: float
    mfu: float | None
    memory_peak_bytes: int


def main(argv: list[str] | None = None) -> int:
    """Run the benchmarks; returns 0, or 2 for a user's mistake."""
    arguments = _parser().parse_args(argv)
    device = devices.choose_device(dist.get_node_local_rank(fallback_rank=0))
    with _process_group(device):
        try:
            config = _config(arguments, dist.get_world_size())
            check_device(config.parallelism, device)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        results = measure(config, device, steps=arguments.steps)
        if dist.get_rank() == 0:
            _print(config, devices.limits(device), results, as_json=arguments.json)
    return 0


def measure(config: TrainConfig, device: torch.device, *, steps: int) -> list[Measured]:
    """Forward, forward with backward, and whole optimizer steps, `steps` times each after two for warming up."""
    mesh = build_mesh(config.parallelism, world_size=dist.get_world_size(), device=device)
    model = build_sharded_model(config, mesh=mesh, device=device)
    optimizer = build_optimizer(model, config.optimizer)
    run = TrainStep(config, model, optimizer, end_of_document=0)
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (config.micro_batch_size, config.seq_len + 1)
    tokens = torch.randint(config.model.vocab_size, shape, generator=generator).to(device)
    micro_batches = [None] * config.gradient_accumulation_steps(dist.get_world_size())

    def forward() -> None:
        with torch.no_grad():
            model(tokens[:, :-1], tokens[:, 1:])

    def forward_backward() -> None:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.zero_grad()

    def step() -> None:
        run(config.schedule.warmup_steps + 1, micro_batches, lambda _: tokens)

    per_pass = config.micro_batch_size * config.seq_len
    return [
        _measure("forward", forward, config, device, tokens=per_pass, steps=steps, flops_share=1 / 3),
        _measure("forward + backward", forward_backward, config, device, tokens=per_pass, steps=steps),
        _measure("optimizer step", step, config, device, tokens=per_pass * len(micro_batches), steps=steps),
    ]


def _measure(
    name: str,
    call: Callable[[], None],
    config: TrainConfig,
    device: torch.device,
    *,
    tokens: int,
    steps: int,
    flops_share: float = 1.0,
) -> Measured:
    for _ in range(2):
        call()
    devices.synchronize(device)
    devices.reset_memory_peak(device)
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        call()
        devices.synchronize(device)
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds)
    share = mfu(config.model, config.seq_len, tokens / median, devices.limits(device))
    return Measured(
        name,
        median,
        tokens / median,
        None if share is None else share * flops_share,
        devices.memory_peak_bytes(device),
    )


def _print(config: TrainConfig, limits: DeviceLimits, results: list[Measured], *, as_json: bool) -> None:
    flops = flops_per_token(config.model, config.seq_len)
    if as_json:
        document = {"device": asdict(limits), "flops_per_token": flops, "results": [asdict(one) for one in results]}
        print(json.dumps({**document, "settings": config.model_dump(mode="json")}, indent=1))
        return
    peak = "peak unknown" if limits.peak_flops is None else f"peak {limits.peak_flops / 1e12:,.0f} TFLOP/s in bf16"
    memory = "" if limits.memory_bytes is None else f", {limits.memory_bytes / 2**30:.0f} GiB"
    print(f"{dist.get_world_size()} x {limits.name}: {peak}{memory}; torch {torch.__version__}")
    print(
        f"{config.model.num_parameters / 1e9:.2f}B parameters, seq_len {config.seq_len}, "
        f"micro batch {config.micro_batch_size}, {flops / 1e9:.2f} GFLOP per token; per rank:"
    )
    for one in results:
        share = "" if one.mfu is None else f"  MFU {one.mfu:6.1%}"
        print(
            f"  {one.name:20s} {one.seconds:9.4f} s  {one.tokens_per_second:12,.0f} tok/s{share}"
            f"  peak {one.memory_peak_bytes / 2**30:7.2f} GiB"
        )


@contextlib.contextmanager
def _process_group(device: torch.device) -> Iterator[None]:
    if dist.is_torchelastic_launched():
        dist.init_process_group(devices.backend(device))
    else:
        dist.init_process_group(devices.backend(device), store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _config(arguments: argparse.Namespace, world_size: int) -> TrainConfig:
    document: dict[str, Any] = {
        "run_name": "benchmark",
        "model": arguments.model,
        "run_directory": "unused",
        "data": {"path": "unused"},
        "total_steps": 1_000_000,
        "seq_len": arguments.seq_len,
        "micro_batch_size": arguments.micro_batch_size,
        "global_batch_size": arguments.micro_batch_size * world_size * arguments.accumulate,
        "parallelism": {
            "param_dtype": arguments.param_dtype,
            "activation_checkpointing": arguments.activation_checkpointing,
            "compile": arguments.compile,
            "float8": arguments.float8,
            "loss_chunk_tokens": arguments.loss_chunk_tokens,
        },
        "checkpoint": {"directory": "unused", "interval_steps": 1},
    }
    try:
        return TrainConfig.model_validate(document)
    except ValidationError as error:
        raise ValueError(describe_errors(error)) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m training.benchmark", description="speed of the training step")
    parser.add_argument("--model", default="llama-3.2-1b", help=f"preset: {', '.join(MODEL_PRESETS)}")
    parser.add_argument("--seq-len", type=int, default=8192, help="tokens per sample")
    parser.add_argument("--micro-batch-size", type=int, default=1, help="samples per rank and forward pass")
    parser.add_argument("--accumulate", type=int, default=1, help="forward passes per optimizer step")
    parser.add_argument("--steps", type=int, default=10, help="repetitions of each measurement")
    parser.add_argument("--param-dtype", default="bfloat16", help="float32 or bfloat16")
    parser.add_argument("--activation-checkpointing", default="none", help="none, selective or full")
    parser.add_argument("--compile", help="inductor, aot_eager or eager; left out: not compiled")
    parser.add_argument("--float8", help="tensorwise or rowwise; left out: no float8")
    parser.add_argument("--loss-chunk-tokens", type=int, help="tokens whose logits exist at one time")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    return parser


if __name__ == "__main__":
    sys.exit(main())
