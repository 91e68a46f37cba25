"""The fault matrix: every kind of fault at every moment of a rank's life, and what each restart layer made of it.

Faults that can follow each other share a run, since starting one takes longer than recovering. Each run is compared
with an undisturbed one; where they differ, every fault of the run is repeated alone, so that the guilty one is named.
"""

import json
import random
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from config.deployment import DeploymentConfig
from drills.goodput import RunAnalysis, analyse, compare_samples
from drills.recovery import FaultOutcome
from drills.run import DrillError, Finished, check, prepare_corpus, run_job, with_faults
from training.config_faults import START_MOMENTS, STORAGE_KINDS, FaultKind, FaultSpec, Moment
from training.events import read_events

SAVE_STEPS = 3
EVALUATION_STEPS = 6
TOTAL_STEPS = 30
RUN_SECONDS = 900.0
# Where each moment of a run is met; saves come every SAVE_STEPS, evaluations every EVALUATION_STEPS.
_STEP_OF = {
    Moment.DATA: 4,
    Moment.FORWARD: 7,
    Moment.BACKWARD: 10,
    Moment.OPTIMIZER: 13,
    Moment.STAGING: 15,
    Moment.BACKGROUND_WRITE: 18,
    Moment.COMMIT: 21,
    Moment.EVALUATION: 24,
    Moment.FINAL_SAVE: TOTAL_STEPS,
    Moment.EXIT: TOTAL_STEPS,
}
_ON_SAVES = (Moment.STAGING, Moment.BACKGROUND_WRITE, Moment.COMMIT)
_AT_END = (Moment.EVALUATION, Moment.FINAL_SAVE, Moment.EXIT)
# Kinds that strike a process wherever it is.
PROCESS_KINDS = (
    FaultKind.EXCEPTION,
    FaultKind.ASYNC_EXCEPTION,
    FaultKind.SIGNAL_EXCEPTION,
    FaultKind.HANG,
    FaultKind.HANG_GIL,
    FaultKind.SIGSTOP,
    FaultKind.SIGKILL,
    FaultKind.SIGTERM,
    FaultKind.SIGINT,
    FaultKind.SEGFAULT,
    FaultKind.ABORT,
    FaultKind.OUT_OF_MEMORY,
)
NODE_KINDS = (FaultKind.LAUNCHER_DEATH, FaultKind.NODE_DEATH, FaultKind.CONTROL_DEATH, FaultKind.NETWORK_LOSS)


@dataclass(frozen=True)
class Setup:
    """Which restart layers a run has, and how many spare nodes. `layers` names those that are on."""

    layers: tuple[str, ...] = ("in_process", "in_job", "job")
    spares: int = 0

    @property
    def name(self) -> str:
        """As a file's name."""
        return "+".join(self.layers) + (f"-{self.spares}spare" if self.spares else "")


ALL = Setup()
IN_JOB = Setup(("in_job", "job"))
JOB = Setup(("job",))
SPARE = Setup(spares=1)


@dataclass(frozen=True)
class Group:
    """Faults that strike one run, one after the other; `also` strike the reference as well (a NaN is data, too).

    `all_strike` is false for random schedules, in which one fault may keep another from its moment.
    """

    name: str
    faults: tuple[FaultSpec, ...]
    setup: Setup = ALL
    also: tuple[FaultSpec, ...] = ()
    all_strike: bool = True


@dataclass
class Cell:
    """One fault of the matrix: what came of it. Times in seconds; None is unknown or never happened."""

    fault: str
    kind: str
    moment: str
    rank: int
    layers: str
    fired: bool
    layer: str | None
    recovery_seconds: float | None
    steps_lost: int | None
    recovered: bool
    bitwise_equal: bool
    command: str
    must_strike: bool = True
    note: str = ""

    @property
    def passed(self) -> bool:
        """Struck, survived, and the final state is the undisturbed run's."""
        survived = self.recovered if self.fired else not self.must_strike
        return survived and self.bitwise_equal


@dataclass
class Matrix:
    """All cells, and what they were made with."""

    cells: list[Cell] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether every cell did."""
        return all(cell.passed for cell in self.cells)


def matrix_deployment(deployment: DeploymentConfig, setup: Setup) -> DeploymentConfig:
    """A short run with frequent saves and evaluations, tight timeouts, and the setup's layers.

    Raises:
        ValueError: the deployment can't be changed so.
    """
    document = deployment.model_dump(mode="json")
    document["name"] = f"matrix-{setup.name}"
    pods_come_back = 20 if "job" in setup.layers else 0
    document["job"] |= {"spare_count": setup.spares, "backoff_limit_per_index": pods_come_back}
    train = document["train"]
    train |= {"total_steps": TOTAL_STEPS, "deterministic": True}
    train["evaluation"] = {"path": train["data"]["path"], "interval_steps": EVALUATION_STEPS, "sequences": 8}
    train["checkpoint"] |= {"interval_steps": SAVE_STEPS, "keep_latest": 3, "save_timeout_seconds": 20}
    restarts = train["restarts"]
    # Hangs are what the tests wait for; a step takes a few tenths of a second here.
    restarts["collective_timeout_seconds"] = 60
    restarts["in_process"] |= {
        "enabled": "in_process" in setup.layers,
        "max_restarts": 30,
        "soft_timeout_seconds": 8,
        "hard_timeout_seconds": 12,
        "barrier_timeout_seconds": 30,
        "heartbeat_timeout_seconds": 10,
    }
    restarts["in_job"] |= {
        "max_restarts": 40 if "in_job" in setup.layers else 0,
        # Faults before the first step come one after the other, without a step between them.
        "max_no_progress_cycles": 10,
        "setup_section_timeout_seconds": 60,
        "step_section_timeout_seconds": 30,
        "checkpointing_section_timeout_seconds": 40,
        "out_of_section_timeout_seconds": 40,
        "initial_heartbeat_timeout_seconds": 90,
        "heartbeat_timeout_seconds": 70,
    }
    restarts["job"]["max_restarts"] = pods_come_back
    return DeploymentConfig.model_validate(document)


def full_groups() -> Iterator[Group]:
    """Every kind at every moment on both ranks, with all layers and with fewer; then what comes in pairs."""
    for setup in (ALL, IN_JOB, JOB):
        for kind in PROCESS_KINDS:
            for rank in (0, 1):
                yield _steps_group(kind, rank, setup)
                yield _start_group(kind, rank, setup)
    for setup in (ALL, IN_JOB):
        yield from _special_groups(setup)
    for kind in NODE_KINDS:
        for rank in (0, 1):
            for setup in (ALL, SPARE) if kind is FaultKind.NODE_DEATH else (ALL,):
                yield from _node_groups(kind, rank, setup)
    yield from _pair_groups()


def quick_groups() -> Iterator[Group]:
    """One of each kind of healing, in a few minutes."""
    yield Group(
        "exceptions",
        (
            _fault(FaultKind.EXCEPTION, Moment.DATA, 1),
            _fault(FaultKind.ASYNC_EXCEPTION, Moment.FORWARD, 0),
            _fault(FaultKind.SIGNAL_EXCEPTION, Moment.OPTIMIZER, 1),
            _fault(FaultKind.EXCEPTION, Moment.BACKGROUND_WRITE, 0),
            _fault(FaultKind.SIGINT, Moment.COMMIT, 0),
            _fault(FaultKind.EXCEPTION, Moment.EVALUATION, 1),
            _fault(FaultKind.EXCEPTION, Moment.FINAL_SAVE, 0),
            _fault(FaultKind.EXCEPTION, Moment.EXIT, 1),
        ),
    )
    yield Group("storage", _STORAGE)
    yield Group(
        "deaths",
        (
            FaultSpec(kind=FaultKind.SIGKILL, step=0, rank=1, moment=Moment.RESTORE),
            _fault(FaultKind.SEGFAULT, Moment.STAGING, 0),
            _fault(FaultKind.SIGKILL, Moment.COMMIT, 0),
            _fault(FaultKind.SIGSTOP, Moment.EVALUATION, 1),
        ),
    )
    yield Group("corruption", (_fault(FaultKind.CORRUPT_CHECKPOINT, Moment.BACKWARD, 0),), IN_JOB)
    yield Group("spare", (_fault(FaultKind.NODE_DEATH, Moment.FORWARD, 0),), SPARE)


def _fault(kind: FaultKind, moment: Moment, rank: int) -> FaultSpec:
    return FaultSpec(kind=kind, step=0 if moment in START_MOMENTS else _STEP_OF[moment], rank=rank, moment=moment)


def _steps_group(kind: FaultKind, rank: int, setup: Setup) -> Group:
    moments = [moment for moment in _STEP_OF if rank == 0 or moment is not Moment.COMMIT]
    faults = tuple(_fault(kind, moment, rank) for moment in moments)
    return Group(f"{kind}-steps-rank{rank}", faults, setup)


def _start_group(kind: FaultKind, rank: int, setup: Setup) -> Group:
    return Group(f"{kind}-start-rank{rank}", tuple(_fault(kind, moment, rank) for moment in START_MOMENTS), setup)


_STORAGE = (
    FaultSpec(kind=FaultKind.STORAGE_FULL, step=5, rank=1),
    FaultSpec(kind=FaultKind.STORAGE_ERROR, step=11, rank=0),
    FaultSpec(kind=FaultKind.STORAGE_STALL, step=17, rank=1),
    FaultSpec(kind=FaultKind.WRITER_DEATH, step=21, rank=0),
    FaultSpec(kind=FaultKind.SLOW, step=25, rank=1),
)


def _special_groups(setup: Setup) -> Iterator[Group]:
    yield Group("storage", _STORAGE, setup)
    # A save that is lost, and then everything: the one before it is what is left.
    yield Group("storage-then-death", (*_STORAGE[:2], FaultSpec(kind=FaultKind.SIGKILL, step=13, rank=0)), setup)
    for rank in (0, 1):
        yield Group(f"corrupt-rank{rank}", (_fault(FaultKind.CORRUPT_CHECKPOINT, Moment.OPTIMIZER, rank),), setup)
        moments = (Moment.DATA, Moment.FORWARD, Moment.BACKWARD, Moment.OPTIMIZER, Moment.EVALUATION)
        faults = tuple(_fault(FaultKind.COLLECTIVE_MISMATCH, moment, rank) for moment in moments)
        yield Group(f"mismatch-rank{rank}", faults, setup)
    nan = FaultSpec(kind=FaultKind.NAN_GRADIENT, step=8, rank=1)
    yield Group("nan-then-death", (FaultSpec(kind=FaultKind.SIGKILL, step=14, rank=0),), setup, also=(nan,))


def _node_groups(kind: FaultKind, rank: int, setup: Setup) -> Iterator[Group]:
    # One each: with a spare, a second lost node would have nobody to take its place.
    for moment in (Moment.RENDEZVOUS, Moment.RESTORE, Moment.FORWARD, Moment.STAGING, Moment.COMMIT, Moment.FINAL_SAVE):
        if moment is not Moment.COMMIT or rank == 0:
            yield Group(f"{kind}-{moment}-rank{rank}", (_fault(kind, moment, rank),), setup)


def _pair_groups() -> Iterator[Group]:
    """Two at once, and one during the recovery from another."""
    for first, second in (
        (FaultKind.SIGKILL, FaultKind.SIGKILL),
        (FaultKind.EXCEPTION, FaultKind.EXCEPTION),
        (FaultKind.EXCEPTION, FaultKind.SIGKILL),
        (FaultKind.HANG, FaultKind.SIGSTOP),
    ):
        both = (FaultSpec(kind=first, step=10, rank=0), FaultSpec(kind=second, step=10, rank=1))
        yield Group(f"{first}-with-{second}", both)
        for moment in (Moment.PROCESS_GROUP, Moment.MODEL, Moment.RESTORE):
            again = FaultSpec(kind=second, step=1, rank=1, moment=moment)  # in its second start
            yield Group(f"{first}-then-{second}-{moment}", (FaultSpec(kind=first, step=10, rank=0), again))


def random_groups(runs: int, seed: int) -> Iterator[Group]:
    """`runs` schedules of one to four faults of any kind at any moment; the same for the same seed."""
    chance = random.Random(seed)
    kinds = (*PROCESS_KINDS, *NODE_KINDS, *STORAGE_KINDS, FaultKind.WRITER_DEATH, FaultKind.CORRUPT_CHECKPOINT)
    for number in range(runs):
        faults = tuple(_random_fault(chance, kinds) for _ in range(chance.randint(1, 4)))
        yield Group(f"seed{seed}-{number}", faults, chance.choice((ALL, ALL, IN_JOB, JOB)), all_strike=False)


def _random_fault(chance: random.Random, kinds: tuple[FaultKind, ...]) -> FaultSpec:
    while True:
        kind, moment, rank = chance.choice(kinds), chance.choice(list(Moment)), chance.randrange(2)
        step = chance.randint(0, 2) if moment in START_MOMENTS else chance.randint(1, TOTAL_STEPS)
        if moment in _AT_END:
            step = _STEP_OF[moment]
        elif moment in _ON_SAVES:
            step = max(1, step // SAVE_STEPS) * SAVE_STEPS
        try:
            return FaultSpec(kind=kind, step=step, rank=rank, moment=moment)
        except ValidationError:  # a kind that can't strike at this moment
            continue


def run_matrix(
    deployment: DeploymentConfig, groups: Iterable[Group], *, out: Path, say: Callable[[str], None]
) -> Matrix:
    """Run every group, and write matrix.json after each: what is done is not lost with an interruption.

    Raises:
        ValueError: a user's mistake; nothing was written.
        DrillError: an undisturbed run failed.
    """
    groups = list(groups)
    bench = _Bench(deployment, out, say)
    for group in groups:
        check(bench.deployment(group), out, None)
    began = time.monotonic()
    bench.open()
    matrix = Matrix()
    for number, group in enumerate(groups, start=1):
        say(f"[{number}/{len(groups)}] {group.name} ({group.setup.name}): {', '.join(map(str, group.faults))}")
        cells = bench.run(group)
        if len(cells) > 1 and not all(cell.passed for cell in cells):
            cells = [cell for fault in group.faults for cell in bench.run(_alone(group, fault))]
        for cell in cells:
            say(_line(cell))
        matrix.cells += cells
        matrix.seconds = time.monotonic() - began
        _write(matrix, out)
    return matrix


def _alone(group: Group, fault: FaultSpec) -> Group:
    return Group(f"{group.name}-{fault.moment}", (fault,), group.setup, group.also)


class _Bench:
    """Runs groups in one folder, and keeps what they are compared with."""

    def __init__(self, deployment: DeploymentConfig, out: Path, say: Callable[[str], None]) -> None:
        self._deployment, self._out, self._say = deployment, out, say
        self._references: dict[tuple[FaultSpec, ...], RunAnalysis] = {}

    def deployment(self, group: Group) -> DeploymentConfig:
        """The group's job with its faults."""
        return with_faults(matrix_deployment(self._deployment, group.setup), (*group.also, *group.faults))

    def open(self) -> None:
        """Make the folder and the corpus."""
        self._out.mkdir(parents=True, exist_ok=True)
        (self._out / "drill.json").write_text("{}\n")
        prepare_corpus(self._deployment, self._out)

    def run(self, group: Group) -> list[Cell]:
        """The group's cells, in the order of its faults."""
        reference = self._reference(group.also)
        run, problem = self._analysed(group)
        return [self._cell(group, fault, run, reference, problem) for fault in group.faults]

    def _reference(self, also: tuple[FaultSpec, ...]) -> RunAnalysis:
        if also not in self._references:
            self._say("undisturbed run" + (f" with {', '.join(map(str, also))}" if also else ""))
            deployment = with_faults(matrix_deployment(self._deployment, ALL), also)
            finished = self._run_job("reference", deployment)
            self._references[also] = _analyse(finished, also)
        return self._references[also]

    def _analysed(self, group: Group) -> tuple[RunAnalysis | None, str]:
        try:
            finished = self._run_job("run", self.deployment(group))
            return _analyse(finished, (*group.also, *group.faults)), ""
        except (DrillError, ValueError) as error:
            kept = self._out / "failed" / f"{group.name}-{group.setup.name}"
            shutil.rmtree(kept, ignore_errors=True)
            kept.parent.mkdir(exist_ok=True)
            shutil.copytree(self._out / "run", kept, symlinks=True, ignore=shutil.ignore_patterns("checkpoints"))
            return None, f"{error} (kept in {kept})"

    def _run_job(self, label: str, deployment: DeploymentConfig) -> Finished:
        shutil.rmtree(self._out / label, ignore_errors=True)
        return run_job(label, deployment, out=self._out, timeout_seconds=RUN_SECONDS, show=lambda _: None)

    def _cell(
        self, group: Group, fault: FaultSpec, run: RunAnalysis | None, reference: RunAnalysis, problem: str
    ) -> Cell:
        outcome = None if run is None else _outcome(run, fault)
        equal = run is not None and _equal(run, reference)
        return Cell(
            fault=str(fault),
            kind=fault.kind,
            moment=fault.moment,
            rank=fault.rank,
            layers=group.setup.name,
            fired=outcome is not None and outcome.fired,
            layer=outcome and outcome.layer,
            recovery_seconds=outcome and outcome.time_to_recover_s,
            steps_lost=outcome and outcome.steps_lost,
            recovered=outcome is not None and outcome.layer is not None,
            bitwise_equal=equal,
            command=self._command(group, fault),
            must_strike=group.all_strike,
            note=problem or ("" if equal or run is None else "; ".join(_differences(run, reference))),
        )

    def _command(self, group: Group, fault: FaultSpec) -> str:
        """What repeats the cell alone, for the deployment file that is written beside the matrix."""
        path = self._out / f"{group.setup.name}.yaml"
        document = matrix_deployment(self._deployment, group.setup).model_dump(mode="json", exclude={"name", "cluster"})
        path.write_text(yaml.safe_dump(document, sort_keys=False))
        faults = " ".join(f"--fault {one}" for one in (*group.also, fault))
        return f"python -m drills run --deployment {path} {faults} --out DIR"


def _analyse(finished: Finished, faults: tuple[FaultSpec, ...]) -> RunAnalysis:
    return analyse(read_events(finished.directory), job_start=finished.started_t, faults=faults)


def _outcome(run: RunAnalysis, fault: FaultSpec) -> FaultOutcome | None:
    wanted = (fault.kind, fault.rank, fault.step, fault.moment)
    return next((one for one in run.faults if (one.kind, one.rank, one.step, one.moment) == wanted), None)


def _equal(run: RunAnalysis, reference: RunAnalysis) -> bool:
    return not _differences(run, reference)


def _differences(run: RunAnalysis, reference: RunAnalysis) -> list[str]:
    samples = compare_samples(run.samples, reference.samples)
    found = []
    if run.params_sha256 is None or run.params_sha256 != reference.params_sha256:
        found.append("other final parameters than the undisturbed run")
    if samples.skipped or samples.repeated or samples.differing_steps:
        found.append("other samples than the undisturbed run")
    if run.replay_mismatches or run.replayed_losses_equal is False:
        found.append("a step that was executed again was another one")
    return found


def _line(cell: Cell) -> str:
    what = f"  {'ok    ' if cell.passed else 'FAILED'} {cell.fault:<44}"
    if not cell.passed:
        reason = cell.note or ("never struck" if not cell.fired else "never recovered")
        return f"{what} {reason}\n         {cell.command}"
    if not cell.fired:
        return f"{what} never struck"
    if cell.layer == "none":
        return f"{what} training went on"
    return f"{what} {cell.layer}, {cell.recovery_seconds:.1f} s, {cell.steps_lost} steps lost"


def _write(matrix: Matrix, out: Path) -> None:
    (out / "matrix.json").write_text(json.dumps([asdict(cell) for cell in matrix.cells], indent=1) + "\n")
    (out / "matrix.md").write_text(markdown(matrix))


def markdown(matrix: Matrix) -> str:
    """Kinds down, moments across; in each cell the slowest recovery in seconds, or what went wrong."""
    layers = list(dict.fromkeys(cell.layers for cell in matrix.cells))
    return "\n".join(_table(name, [cell for cell in matrix.cells if cell.layers == name]) for name in layers)


def _table(layers: str, cells: list[Cell]) -> str:
    moments = [moment for moment in Moment if any(cell.moment == moment for cell in cells)]
    kinds = list(dict.fromkeys(cell.kind for cell in cells))
    lines = [f"Layers: {layers}\n", f"| | {' | '.join(moments)} |", "|---|" + "---|" * len(moments)]
    for kind in kinds:
        row = [_summary([cell for cell in cells if (cell.kind, cell.moment) == (kind, moment)]) for moment in moments]
        lines.append(f"| {kind} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def _summary(cells: list[Cell]) -> str:
    if not cells:
        return ""
    if not all(cell.passed for cell in cells):
        return "FAILED"
    healed: list[Any] = [cell.recovery_seconds for cell in cells if cell.layer != "none"]
    return f"{max(healed):.1f}" if healed else "went on"
