"""How the nodes meet: a store on rank 0's node, roll calls that name who is missing, and the clocks compared.

Every wait is bounded.
"""

import datetime
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from training.preflight.checks import Check, failed, passed, skipped

_SAMPLES = 5
_POLL_SECONDS = 0.05
# Rank 0 has the store: it stays a little for the others to read the outcome of a roll call.
_LINGER_SECONDS = 10.0


class PeersMissingError(RuntimeError):
    """Not every rank came; the text names those that did not."""


@dataclass(frozen=True)
class Rendezvous:
    """Where and as whom this node takes part."""

    host: str
    port: int
    rank: int
    world_size: int


class Peers:
    """The other nodes, through the store."""

    def __init__(self, rendezvous: Rendezvous, *, wait_seconds: float) -> None:
        self.rank, self.world_size = rendezvous.rank, rendezvous.world_size
        self._wait = wait_seconds
        try:
            self.store = dist.TCPStore(
                rendezvous.host,
                rendezvous.port,
                is_master=self.rank == 0,
                wait_for_workers=False,
                timeout=datetime.timedelta(seconds=wait_seconds),
            )
        except dist.DistError as error:
            where = f"{rendezvous.host}:{rendezvous.port}"
            if self.rank == 0:
                raise PeersMissingError(f"cannot listen on {where}: {_first_line(error)}") from error
            raise PeersMissingError(
                f"rank 0 did not come within {wait_seconds:g} s ({where} does not answer)"
            ) from error

    def roll_call(self, name: str, message: str = "") -> list[str]:
        """Wait until every rank has called the same name; returns their messages in the order of ranks.

        Raises:
            PeersMissingError: on every rank that came, with the ranks that did not.
        """
        self._set(f"{name}/{self.rank}", message)
        if self.rank == 0:
            missing = self._await(f"{name}/{{}}", range(self.world_size), self._wait)
            self._set(f"{name}/missing", " ".join(map(str, missing)))
            self._await(
                f"{name}/read/{{}}", [r for r in range(1, self.world_size) if r not in missing], _LINGER_SECONDS
            )
        else:
            missing = [int(rank) for rank in self._get(f"{name}/missing", self._wait + _LINGER_SECONDS).split()]
            # From here on rank 0 may go, unless it waits for what follows.
            messages = None if missing else self._messages(name)
            self._set(f"{name}/read/{self.rank}", "")
            if messages is not None:
                return messages
        if missing:
            ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            raise PeersMissingError(f"{ranks} of {self.world_size} did not come within {self._wait:g} s ({name})")
        return self._messages(name)

    def clock(self, *, limit_seconds: float, now: Callable[[], float]) -> Check:
        """This node's clock against rank 0's. NVRx compares heartbeats by the clocks of different machines."""
        if self.world_size == 1:
            return skipped("clock", "one node")
        if self.rank == 0:
            for rank in range(1, self.world_size):
                for sample in range(_SAMPLES):
                    self._get(f"clock/{rank}/{sample}/ask", self._wait)
                    self._set(f"clock/{rank}/{sample}/answer", repr(now()))
            return passed("clock", "the one that the others compare with")
        offset, error = min((self._sample(sample, now) for sample in range(_SAMPLES)), key=lambda pair: pair[1])
        values = {"offset_s": round(offset, 6), "error_s": round(error, 6), "limit_s": limit_seconds}
        if abs(offset) - error > limit_seconds:
            return failed(
                "clock", f"{offset:+.3f} s from rank 0's, {limit_seconds:g} s are allowed; look at chronyd", **values
            )
        return passed("clock", f"{offset:+.4f} s from rank 0's", **values)

    def _sample(self, sample: int, now: Callable[[], float]) -> tuple[float, float]:
        """Offset in seconds and half the round trip, which bounds its error."""
        asked, started = now(), time.monotonic()
        self._set(f"clock/{self.rank}/{sample}/ask", "")
        answer = float(self._get(f"clock/{self.rank}/{sample}/answer", self._wait))
        half = (time.monotonic() - started) / 2
        return asked + half - answer, half

    def _messages(self, name: str) -> list[str]:
        return [self._get(f"{name}/{rank}", self._wait) for rank in range(self.world_size)]

    def _await(self, key: str, ranks: "range | list[int]", seconds: float) -> list[int]:
        """Those of `ranks` whose key is not there after so many seconds."""
        deadline = time.monotonic() + seconds
        missing = list(ranks)
        while True:
            missing = [rank for rank in missing if not self.store.check([key.format(rank)])]
            if not missing or time.monotonic() > deadline:
                return missing
            time.sleep(_POLL_SECONDS)

    def _get(self, key: str, seconds: float) -> str:
        try:
            self.store.wait([key], datetime.timedelta(seconds=seconds))
            return self.store.get(key).decode()
        except dist.DistError as error:
            raise PeersMissingError(self._lost(key, seconds)) from error

    def _set(self, key: str, value: str) -> None:
        try:
            self.store.set(key, value)
        except dist.DistError as error:
            raise PeersMissingError(self._lost(key, 0)) from error

    def _lost(self, key: str, seconds: float) -> str:
        asked = key.split("/")
        rank = asked[1] if self.rank == 0 and asked[0] == "clock" else "0"
        return f"rank {rank} went away, or did not answer within {seconds:g} s ({asked[0]})"


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]
