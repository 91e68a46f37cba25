"""All-reduce over every GPU of every node, or over CPU processes: right results, and bandwidth by message size.

`python -m training.preflight.allreduce --host H --port P --rank R --world-size N --local-rank L ...`: one process per
GPU, started by the preflight of its node. Each first multiplies two matrices on its GPU and checks the result. The last
line of standard output is JSON.
"""

import argparse
import datetime
import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from training.lifetime import die_with_parent

_FLOAT_BYTES = 4
_SMALLEST_BYTES = 1024
_STEP = 4
_WARMUPS = 2
_MATRIX = 4096
_SEED = 7


def main(argv: list[str] | None = None) -> int:
    """One process of the sweep; returns the exit code."""
    die_with_parent()  # nothing of a preflight that was killed goes on taking part
    arguments = parse_arguments(argv)
    device = torch.device("cuda", arguments.local_rank) if arguments.backend == "nccl" else torch.device("cpu")
    outcome: dict[str, Any] = {"rank": arguments.rank}
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        outcome["matmul"] = multiply(device)
        limit = datetime.timedelta(seconds=arguments.timeout)
        store = dist.TCPStore(arguments.host, arguments.port, is_master=False, timeout=limit, wait_for_workers=False)
        dist.init_process_group(
            arguments.backend,
            store=dist.PrefixStore("all-reduce", store),
            rank=arguments.rank,
            world_size=arguments.world_size,
            timeout=limit,
        )
        outcome["sweep"] = sweep(device, max_mib=arguments.max_mib, iterations=arguments.iterations)
        dist.barrier()
        dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:  # torch's errors are RuntimeErrors
        outcome["error"] = str(error).splitlines()[0]
    print(json.dumps(outcome), flush=True)
    return 1 if "error" in outcome else 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Options of one process."""
    parser = argparse.ArgumentParser(prog="training.preflight.allreduce", description="one process of the all-reduce")
    for name in ("--port", "--rank", "--world-size", "--local-rank", "--max-mib", "--iterations"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--backend", choices=("nccl", "gloo"), required=True)
    parser.add_argument(
        "--timeout", type=float, required=True, help="seconds for the whole group to come, and per call"
    )
    return parser.parse_args(argv)


def multiply(device: torch.device) -> dict[str, float]:
    """Multiply two matrices of small integers, whose product is exact in float32.

    Raises:
        RuntimeError: a wrong product.
    """
    size = _MATRIX if device.type == "cuda" else _MATRIX // 16
    generator = torch.Generator().manual_seed(_SEED)
    left, right = (torch.randint(-4, 5, (size, size), generator=generator, dtype=torch.float32) for _ in range(2))
    on_device = left.to(device), right.to(device)
    product = on_device[0] @ on_device[1]
    rows = slice(0, size, size // 32)
    if not torch.equal(product[rows].cpu(), left[rows] @ right):
        raise RuntimeError(f"{device} multiplies wrongly")
    _synchronize(device)
    started = time.monotonic()
    for _ in range(10):
        torch.matmul(*on_device, out=product)
    _synchronize(device)
    return {"size": size, "tflop_s": round(10 * 2 * size**3 / (time.monotonic() - started) / 1e12, 3)}


def sweep(device: torch.device, *, max_mib: int, iterations: int) -> list[dict[str, float]]:
    """Per message size: microseconds, algorithm bandwidth and bus bandwidth in GB/s, of the slowest rank.

    Bus bandwidth is what each link carries, 2(n-1)/n times the algorithm bandwidth, comparable over numbers of ranks
    (nccl-tests, PERFORMANCE.md).

    Raises:
        RuntimeError: a wrong sum, or torch's own.
    """
    world_size = dist.get_world_size()
    expected = world_size * (world_size + 1) / 2
    rows, size = [], _SMALLEST_BYTES
    while size <= max_mib << 20:
        tensor = torch.full((size // _FLOAT_BYTES,), dist.get_rank() + 1.0, device=device)
        dist.all_reduce(tensor)
        if not bool((tensor == expected).all()):
            raise RuntimeError(f"all-reduce of {size} bytes gives a wrong sum")
        seconds = _time(tensor.zero_(), iterations)
        algorithm = size / seconds / 1e9
        rows.append(
            {
                "bytes": size,
                "time_us": round(seconds * 1e6, 1),
                "algorithm_gb_s": round(algorithm, 4),
                "bus_gb_s": round(algorithm * 2 * (world_size - 1) / world_size, 4),
            }
        )
        size *= _STEP
    return rows


def _time(tensor: torch.Tensor, iterations: int) -> float:
    for _ in range(_WARMUPS):
        dist.all_reduce(tensor)
    _synchronize(tensor.device)
    dist.barrier()
    started = time.monotonic()
    for _ in range(iterations):
        dist.all_reduce(tensor)
    _synchronize(tensor.device)
    took = torch.tensor([time.monotonic() - started], device=tensor.device)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.item() / iterations


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
