"""Event logs with known times, in the form that training.events.read_events gives."""

LOSS_BITS = 1 / 1024  # keeps the losses exact


class SyntheticLog:
    """Writes the events of all ranks along one clock, in seconds since the job's start at `start`."""

    def __init__(self, *, ranks=2, start=1000.0, interval_steps=10, total_steps=60):
        self.start, self.now = start, 0.0
        self.ranks, self.interval_steps, self.total_steps = ranks, interval_steps, total_steps
        self.cycle = self.iteration = 0
        self.events = []

    def write(self, event, *, rank, at=None, **fields):
        stamp = {"t": self.start + (self.now if at is None else at), "event": event, "rank": rank}
        life = {"pid": 100 * (self.cycle + 1) + rank, "cycle": self.cycle, "iteration": self.iteration}
        self.events.append({**stamp, **life, **fields})

    def all(self, event, **fields):
        for rank in range(self.ranks):
            self.write(event, rank=rank, **fields)

    def processes(self, *, created=0.25, imports=2.0, setup=0.5):
        """New processes, `created` seconds from now; then imports, process group and model."""
        self.now += created
        created_t = self.start + self.now
        self.now += 0.5
        self.all("process_start", created_t=created_t, world_size=self.ranks)
        self.now += imports
        self.enter(setup=setup)

    def enter(self, *, setup=0.5):
        self.all("enter")
        self.all("process_group_ready")
        self.now += setup
        self.all("model_ready")

    def restore(self, step, *, seconds=0.25):
        self.all("restore_start")
        self.now += seconds
        self.all("restored", step=step, tier="durable" if step else "none")

    def steps(self, first, last, *, seconds=0.15, save=0.05, commit=True):
        for step in range(first, last + 1):
            started_t = self.start + self.now
            self.now += seconds
            for rank in range(self.ranks):
                ids = [step * 8 + rank * 4 + index for index in range(4)]
                loss = 2 + round(3 / step / LOSS_BITS) * LOSS_BITS + (step * 7 % 5) / 32
                self.write("step", rank=rank, step=step, started_t=started_t, loss=loss, sample_ids=ids,
                           grad_norm=1.0, learning_rate=1e-3)  # fmt: skip
            if step % self.interval_steps == 0:
                started_t = self.start + self.now
                self.now += save
                self.all("stall", step=step, started_t=started_t, phase="save")
                if commit:
                    self.write("checkpoint_committed", rank=0, step=step, started_t=started_t, size_bytes=1000)

    def fault(self, kind, *, rank, step, moment="backward", after=0.05):
        """The step in flight is broken off `after` seconds from now."""
        self.now += after
        self.write("fault", rank=rank, kind=kind, step=step, moment=moment)

    def abort(self, *, detect):
        self.now += detect
        self.all("abort")

    def enter_again(self, *, after, setup=0.125):
        self.now += after
        self.iteration += 1
        self.enter(setup=setup)

    def new_cycle(self, *, detect, imports=2.0, cycle=None):
        self.cycle = self.cycle + 1 if cycle is None else cycle
        self.iteration = 0
        self.processes(created=detect, imports=imports)

    def complete(self, *, digest="a" * 64, after=0.125):
        self.now += after
        self.all("complete", step=self.total_steps, loss=2.5, params_sha256=digest)


def undisturbed():
    log = SyntheticLog()
    log.processes()
    log.restore(0, seconds=0.02)
    log.steps(1, 60)
    log.complete()
    return log


def healed():
    """An exception on rank 1 in step 25, healed in process; a SIGKILL of rank 0 in step 42, healed in the job."""
    log = SyntheticLog()
    log.processes()
    log.restore(0, seconds=0.02)
    log.steps(1, 24)
    log.fault("exception", rank=1, step=25)
    log.abort(detect=0.1)
    log.enter_again(after=0.3)
    log.restore(20, seconds=0.15)
    log.steps(21, 41)
    log.fault("sigkill", rank=0, step=42)
    log.new_cycle(detect=1.5, imports=2.5)
    log.restore(40, seconds=0.5)
    log.steps(41, 60)
    log.complete()
    return log
