"""Entry point of one rank, started by ft_launcher: `python -m training.train --config train.json`.

Reads the environment that the launcher sets, connects the stores, and enters the training function inside the
in-process restart layer. Heavy imports wait until the settings have been read.
"""

import argparse
import gc
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from training import peer_watch
from training.config import DONE_MARKER, EXIT_BAD_CONFIG, NO_RESTART_MARKER, TrainConfig, load_train_json
from training.config_faults import Moment
from training.events import EventLog
from training.faults import FaultInjector
from training.peer_watch import PeerWatch
from training.stopping import StopRequest
from training.supervisor import STOP_FILE_VARIABLE

if TYPE_CHECKING:  # imported late at run time: see _train
    import torch

NVRX_VERSION = "0.7.0"


def main() -> int:
    """Run this rank; returns the process's exit code."""
    parser = argparse.ArgumentParser(description="train one rank; started by ft_launcher")
    parser.add_argument("--config", type=Path, required=True, help="train.json")
    arguments = parser.parse_args()
    world_size = int(os.environ["WORLD_SIZE"])
    try:
        config = load_train_json(arguments.config)
    except ValueError as error:
        return _refuse(str(error), run_directory=None)
    try:
        config.check_world_size(world_size)
    except ValueError as error:
        return _refuse(str(error), run_directory=Path(config.run_directory))
    rank, cycle = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if rank == 0:  # before any rank can have an outcome: none does before it met rank 0
        for marker in (DONE_MARKER, NO_RESTART_MARKER):
            (Path(config.run_directory) / marker).unlink(missing_ok=True)
    events = EventLog(Path(config.run_directory), rank=rank, cycle=cycle)
    settings = config.model_dump(mode="json") if rank == 0 else None
    events.write("process_start", created_t=psutil.Process().create_time(), world_size=world_size, settings=settings)
    stop_file = os.environ.get(STOP_FILE_VARIABLE)
    stop = StopRequest(config, None if stop_file is None else Path(stop_file))
    stop.listen()
    node = int(os.environ.get("GROUP_RANK", "0"))
    faults = FaultInjector(config.faults, run_directory=Path(config.run_directory), rank=rank, node=node, events=events)
    faults.at(Moment.IMPORT)
    return _train(config, events, stop, faults, rank=rank, world_size=world_size, cycle=cycle)


def _refuse(reason: str, *, run_directory: Path | None) -> int:
    """Say why this can't be trained, and have the launcher end the job: the same settings would fail again."""
    from training.resilience import RankMonitor

    print(f"error: {reason}", file=sys.stderr)
    if run_directory is not None:  # for the supervisor, since ft_launcher passes no rank's exit code on
        run_directory.mkdir(parents=True, exist_ok=True)
        (run_directory / NO_RESTART_MARKER).write_text(reason + "\n")
    monitor = RankMonitor(enabled="FT_RANK_MONITOR_IPC_SOCKET" in os.environ)
    monitor.connect()
    monitor.stop_job(reason)
    return EXIT_BAD_CONFIG


def _train(
    config: TrainConfig,
    events: EventLog,
    stop: StopRequest,
    faults: FaultInjector,
    *,
    rank: int,
    world_size: int,
    cycle: int,
) -> int:
    # Importing torch makes a million objects that live as long as the process. Collecting garbage among them slows
    # the import by a fifth, and each in-process restart, where NVRx collects until nothing is left, by half a second.
    gc.disable()
    import nvidia_resiliency_ext
    import torch

    from training.checkpoint.saver import Saver
    from training.device import choose_device
    from training.resilience import RankMonitor, wrap_in_process
    from training.trainer import Process, run_attempt

    gc.freeze()
    gc.enable()
    if nvidia_resiliency_ext.__version__ != NVRX_VERSION:
        found = nvidia_resiliency_ext.__version__
        return _refuse(
            f"nvidia-resiliency-ext {NVRX_VERSION} is needed, not {found}", run_directory=Path(config.run_directory)
        )
    device = choose_device(int(os.environ.get("LOCAL_RANK", "0")))
    if config.deterministic:
        torch.use_deterministic_algorithms(True)
    faults.at(Moment.RENDEZVOUS)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = torch.distributed.TCPStore(host, port, world_size, is_master=rank == 0, wait_for_workers=False)
    restart_port = _agree_on_port(store, rank)
    watch = _watch_peer(config, store, events, rank=rank, world_size=world_size)
    process = Process(
        rank=rank,
        world_size=world_size,
        cycle=cycle,
        device=device,
        store=store,
        events=events,
        monitor=RankMonitor(enabled="FT_RANK_MONITOR_IPC_SOCKET" in os.environ),
        faults=faults,
        saver=Saver(rank=rank, device=device),
        stop=stop,
        ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )
    with _gpu_checks_only_with_gpu(device.type):
        train = wrap_in_process(
            lambda call_wrapper: run_attempt(config, process, call_wrapper),
            restarts=config.restarts,
            events=events,
            world_size=world_size,
            device=device,
            store_host=host,
            store_port=restart_port,
            kept_ports=watch.ports | {port},
        )
    try:
        code = train()
    except BaseException:
        process.saver.close(abort=True)
        raise
    process.saver.close()
    watch.close()
    return code


def _watch_peer(
    config: TrainConfig, store: "torch.distributed.TCPStore", events: EventLog, *, rank: int, world_size: int
) -> PeerWatch:
    def on_loss(peer: int) -> None:
        events.write("peer_lost", peer=peer)
        peer_watch.leave(peer)

    return PeerWatch(
        store,
        rank=rank,
        world_size=world_size,
        address=peer_watch.own_address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])),
        silent_seconds=config.restarts.in_process.heartbeat_timeout_seconds,
        on_loss=on_loss,
    )


@contextmanager
def _gpu_checks_only_with_gpu(device_type: str) -> Iterator[None]:
    """Hide LOCAL_RANK on CPU while NVRx builds its restart health check.

    Where it is set, NVRx 0.7.0 adds checks of GPU, NVLink and NIC, which fail every restart on a host without NVML.
    """
    hidden = os.environ.pop("LOCAL_RANK") if device_type == "cpu" else None
    yield
    if hidden is not None:
        os.environ["LOCAL_RANK"] = hidden


def _agree_on_port(store: "torch.distributed.TCPStore", rank: int) -> int:
    """A port on rank 0's host for the restart layer's own store: free when asked for, told to all over `store`."""
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            store.set("in_process_port", str(probe.getsockname()[1]))
    return int(store.get("in_process_port"))


if __name__ == "__main__":
    sys.exit(main())
