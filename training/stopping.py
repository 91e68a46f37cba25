"""Why training ends before its last step: the pod was told to stop, or the run's own deadline is near.

Each rank only knows its own wish; the ranks agree within the step (training.step).
"""

import os
import signal
import time
from enum import Enum
from pathlib import Path
from types import FrameType

from training.config import TrainConfig


class StopReason(Enum):
    """What to tell people, and how the job ends: `SIGTERM` may be restarted elsewhere, `DEADLINE` must not be."""

    SIGTERM = "told to stop by SIGTERM"
    DEADLINE = "stop_at is near"


class StopRequest:
    """This process's wish to stop. Lives as long as the process, so that an in-process restart doesn't forget it."""

    def __init__(self, config: TrainConfig, stop_file: Path | None = None) -> None:
        """`stop_file` is there once the supervisor was told to stop; None: run without one, SIGTERM ends at once."""
        self._stop_file = stop_file
        self._last_t = None if config.stop_at is None else config.stop_at.timestamp() - config.stop_margin_seconds
        self.told = False

    def listen(self) -> None:
        """From now on SIGTERM is a wish, if the supervisor has it (a node drain, the end of a Spot instance).

        ft_launcher sends the same signal to the ranks that are left when one has died, and then waits for them before
        it starts new ones: those have to end at once, as without a handler.
        """
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, signum: int, _frame: FrameType | None) -> None:
        if self._stop_file is not None and self._stop_file.exists():
            self.told = True
        else:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    @property
    def past_deadline(self) -> bool:
        """Whether less than stop_margin_seconds is left until stop_at, by this host's clock."""
        return self._last_t is not None and time.time() >= self._last_t

    @property
    def reason(self) -> StopReason | None:
        """Why this rank wants to stop, None if it does not."""
        if self.told:
            return StopReason.SIGTERM
        return StopReason.DEADLINE if self.past_deadline else None
