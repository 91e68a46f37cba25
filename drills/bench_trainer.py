"""What the trainer costs beyond the bare loop, what reading data costs, and the way back to the first step.

`python -m drills bench-trainer`: measured side by side in one run, on the CPU; ratios of medians against bounds.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from drills.local_cluster import free_port
from training import prepare_data
from training.config import TrainConfig
from training.data import DataOrder, TokenizedCorpus
from training.events import read_events
from training.model import Llama, full_initial_value
from training.optimizer import build_optimizer
from training.parallelism import build_mesh, build_sharded_model
from training.step import TrainStep

_REPOSITORY = Path(__file__).resolve().parent.parent
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Bound:
    """One measured ratio and what it may be at most."""

    name: str
    measured: float
    bound: float
    detail: str

    @property
    def kept(self) -> bool:
        """Whether the bound is kept."""
        return self.measured <= self.bound


def run_benchmark(*, repetitions: int, restarts: int) -> list[Bound]:
    """Measure everything; prints one line per bound as it is known."""
    bounds = []
    torch.set_num_threads(1)  # as in a rank of a drill; more threads than idle cores measure the scheduler
    with tempfile.TemporaryDirectory(prefix="bench-trainer-") as directory:
        config = _config(Path(directory))
        for measure in (
            lambda: _step_against_bare_loop(config, repetitions),
            lambda: _data_loading(config, repetitions),
            lambda: _restart_against_import(config, restarts),
        ):
            bound = measure()
            verdict = "kept" if bound.kept else "BROKEN"
            print(
                f"{bound.name:42s} {bound.measured:6.3f}  (at most {bound.bound:g}: {verdict})  {bound.detail}",
                flush=True,
            )
            bounds.append(bound)
    return bounds


def _config(directory: Path) -> TrainConfig:
    (directory / "text").mkdir()
    (directory / "text" / "a.py").write_text((_REPOSITORY / "training" / "trainer.py").read_text() * 20)
    prepare_data.prepare(directory / "text", "*.py", directory / "corpus", tokenizer="bytes")
    document = {
        "run_name": "bench",
        "model": "debug-3m",
        "run_directory": str(directory / "run"),
        "data": {"path": str(directory / "corpus")},
        "total_steps": 1_000_000,
        "seq_len": 128,
        "micro_batch_size": 4,
        "global_batch_size": 4,
        "parallelism": {"param_dtype": "float32"},
        "checkpoint": {"directory": str(directory / "checkpoints"), "interval_steps": 1},
        # A benchmark's rank is started by hand, without ft_launcher.
        "restarts": {"in_process": {"enabled": False}},
    }
    return TrainConfig.model_validate(document)


def _step_against_bare_loop(config: TrainConfig, repetitions: int) -> Bound:
    """Both on one rank, in turns, so that a busy moment of the machine meets both."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = build_mesh(config.parallelism, world_size=1, device=_CPU)
        model = build_sharded_model(config, mesh=mesh, device=_CPU)
        trainer_step = TrainStep(config, model, build_optimizer(model, config.optimizer), end_of_document=0)
        tokens = torch.randint(config.model.vocab_size, (config.micro_batch_size, config.seq_len + 1))
        bare_step = _bare_loop(config, tokens)
        ours, bare = _in_turns(lambda: trainer_step(1, [None], lambda _: tokens), bare_step, repetitions=repetitions)
    finally:
        dist.destroy_process_group()
    return Bound("step / bare loop", ours / bare, 1.05, f"{1000 * ours:.1f} ms against {1000 * bare:.1f} ms")


def _bare_loop(config: TrainConfig, tokens: torch.Tensor) -> Callable[[], object]:
    """The same model, forward, backward and optimizer, and nothing else: no sharding, no clipping, no metrics."""
    model = Llama(config.model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = full_initial_value(name, parameter.shape, config=config.model, seed=config.seed, device=_CPU)
            parameter.copy_(value)
    optimizer = build_optimizer(model, config.optimizer)

    def step() -> None:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _data_loading(config: TrainConfig, repetitions: int) -> Bound:
    """Choosing and reading a batch, against the step that trains on it."""
    corpus = TokenizedCorpus(Path(config.data.path))
    order = DataOrder(corpus.num_samples(config.seq_len), config.global_batch_size, config.seed)
    tokens = torch.randint(config.model.vocab_size, (config.micro_batch_size, config.seq_len + 1))
    step_of = iter(range(1, 1_000_000))

    def load() -> None:
        for ids in order.rank_sample_ids(next(step_of), 0, 1, config.micro_batch_size):
            [corpus.tokens(int(sample_id), config.seq_len) for sample_id in ids]

    loading, step = _in_turns(load, _bare_loop(config, tokens), repetitions=repetitions)
    return Bound("data loading / step", loading / step, 0.01, f"{1e6 * loading:.0f} us against {1000 * step:.1f} ms")


def _in_turns(first: Callable[[], object], second: Callable[[], object], *, repetitions: int) -> tuple[float, float]:
    seconds: tuple[list[float], list[float]] = ([], [])
    for repetition in range(repetitions + 3):
        for call, taken in zip((first, second), seconds, strict=True):
            started = time.perf_counter()
            call()
            if repetition >= 3:  # the first ones warm up
                taken.append(time.perf_counter() - started)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def _restart_against_import(config: TrainConfig, restarts: int) -> Bound:
    """From the creation of a rank that resumes to the beginning of its first step, against importing torch."""
    train_json = Path(config.run_directory).parent / "train.json"
    train_json.write_text(config.model_dump_json())
    _run_rank_until("checkpoint_committed", config, train_json)
    to_step, imports = [], []
    for _ in range(restarts):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        imports.append(time.perf_counter() - started)
        events = _run_rank_until("step", config, train_json)
        to_step.append(events["step"]["started_t"] - events["process_start"]["created_t"])
    ours, importing = statistics.median(to_step), statistics.median(imports)
    return Bound("start to first step / import torch", ours / importing, 1.5, f"{ours:.1f} s against {importing:.1f} s")


def _run_rank_until(kind: str, config: TrainConfig, train_json: Path) -> dict[str, dict]:
    """Start a rank by hand, kill it when it has written an event of this kind; returns its first event of each kind."""
    environment = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    with train_json.with_name("rank.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "training.train", f"--config={train_json}"],
            cwd=_REPOSITORY,
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        while True:
            ended = process.poll() is not None
            events = {event["event"]: event for event in _events_of(process.pid, config)}
            if kind in events:
                return events
            if ended:
                raise RuntimeError(f"the rank ended with {process.returncode}: {log.name}")
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()


def _events_of(pid: int, config: TrainConfig) -> list[dict]:
    """What process `pid` has written so far, the first event of a kind last."""
    directory = Path(config.run_directory)
    events = read_events(directory) if directory.exists() else []
    return [event for event in reversed(events) if event["pid"] == pid]
