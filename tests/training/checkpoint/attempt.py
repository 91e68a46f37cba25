"""One rank's training attempt as the checkpoint tests need it: tensors whose values are a function of the step."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from training.checkpoint.checkpointer import Checkpointer, Outcome
from training.checkpoint.durable import checkpoint_path
from training.checkpoint.restorer import Restored
from training.checkpoint.saver import Saver
from training.checkpoint.writer import OpenFile, open_binary
from training.config import CheckpointConfig

SIZE = 1000


class Attempt:
    """A rank that "trains": each update adds 1 to every tensor, so that a step's values are known."""

    def __init__(
        self,
        directory: Path,
        rank: int,
        *,
        saver: Saver | None = None,
        name: str = "0-0",
        open_file: OpenFile = open_binary,
        size: int = SIZE,
        **settings,
    ) -> None:
        self.rank = rank
        self.live = {f"w{rank}": torch.full((size,), float(rank)), "shared": torch.zeros(10), "one": torch.zeros(())}
        self.saver = saver or Saver(rank=rank, device=torch.device("cpu"), open_file=open_file)
        self.config = CheckpointConfig(**{"directory": str(directory), "interval_steps": 1, **settings})
        self.step = 0
        self.outcome = Outcome()
        self.checkpointer = Checkpointer(
            self.config, saver=self.saver, live=self.live, moment=self.moment, attempt=name
        )

    def moment(self) -> dict[str, torch.Tensor]:
        return {f"random{self.rank}": torch.tensor([self.step, self.rank])}

    def restore(self) -> Restored:
        restored = self.checkpointer.restore(lambda _manifest: None)
        self.step = restored.step
        self.checkpointer.get_ready(restored)
        return restored

    def train_to(self, last: int, *, wait: bool = True) -> None:
        """Update, then save, for every step up to `last`."""
        while self.step < last:
            self.checkpointer.before_update()
            for tensor in self.live.values():
                tensor.add_(1)
            self.step += 1
            self.checkpointer.poll()
            self.checkpointer.save(self.step, {"loss": float(self.step)})
            if wait:
                self.checkpointer.before_update()
                self.checkpointer.wait()
            self._collect()

    def _collect(self) -> None:
        new = self.checkpointer.drain()
        self.outcome.committed += new.committed
        self.outcome.replicated += new.replicated
        self.outcome.failed += new.failed

    @property
    def committed(self) -> list[int]:
        return [one["step"] for one in self.outcome.committed]

    def values(self) -> list[float]:
        """What must be [step + rank, step, step]."""
        return [self.live[f"w{self.rank}"][0].item(), self.live["shared"][-1].item(), self.live["one"].item()]

    def holds(self, step: int) -> bool:
        """Whether every element of the live tensors is that of `step`."""
        own = torch.full_like(self.live[f"w{self.rank}"], float(step + self.rank))
        return torch.equal(self.live[f"w{self.rank}"], own) and self.values()[1:] == [step, step]

    def close(self) -> None:
        self.checkpointer.wait()
        self.checkpointer.close()
        self.saver.close()


def stored_values(directory: Path, step: int, *, world_size: int = 2, size: int = SIZE) -> list[float]:
    """First element of each rank's tensor, read by plain dcp.load in one process."""
    whole = {f"w{rank}": torch.zeros(size) for rank in range(world_size)}
    dcp.load(whole, checkpoint_id=str(checkpoint_path(directory, step)), no_dist=True)
    return [whole[f"w{rank}"][0].item() for rank in range(world_size)]


def meet() -> None:
    """Every rank has come this far."""
    dist.barrier()
