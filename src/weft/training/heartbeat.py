"""A process that does not go on while the others wait for it is named, and the run ends (`train.rank_timeout`).

Each process counts what it does together with the others (`beat`), and a thread of it publishes the count in the
store of `torchrun`. A process whose own count stands still for too long compares it with those of the others: one that
is behind, or whose thread has stopped too, is what all wait for.
"""

import os
import random
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from weft.training.distributed import World, count_exchanges
from weft.training.launch import TOLD, USER_ERROR, hand_over

POLLS = 20  # of the others within a time-out


@dataclass
class _Peer:
    """What another process has published, and when that was last seen to change."""

    exchanges: int = -1
    host: str = "?"
    pid: int = 0
    seen: float = field(default_factory=time.monotonic)
    text: bytes = b""

    def read(self, text: bytes) -> None:
        if text != self.text:
            self.text, self.seen = text, time.monotonic()
            exchanges, _, self.host, pid = text.decode().split()
            self.exchanges, self.pid = int(exchanges), int(pid)


class Heartbeat:
    """Context that watches the processes of a training; a single process has nothing to watch."""

    def __init__(self, world: World, timeout: float) -> None:
        self._world, self._timeout = world, timeout
        self._stop, self._since, self._prefix = threading.Event(), time.monotonic(), ""
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        if self._world.joined_group:
            # Another name for each start: a store may outlive the processes that are started again.
            own = random.SystemRandom().randrange(2**32) if self._world.main else 0
            self._prefix = f"weft/beat/{self._world.sum({'name': own})['name']:.0f}"
            self._since = time.monotonic()
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        peers = {rank: _Peer() for rank in range(self._world.size) if rank != self._world.rank}
        try:
            limit = timedelta(seconds=self._timeout)
            self._poll(TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit), peers)
        except RuntimeError:  # the store is in a process, which has ended, or hangs
            if not self._stop.is_set() and 0 in peers and time.monotonic() - self._since > self._timeout:
                self._end([0], peers)

    def _poll(self, store: Any, peers: dict[int, _Peer]) -> None:
        """Publish this process's count, and read the others', until training is over or one of them hangs."""
        host, count, tick = socket.gethostname(), count_exchanges(), 0
        while not self._stop.wait(min(5.0, self._timeout / POLLS)):
            tick += 1
            if count != count_exchanges():
                count, self._since = count_exchanges(), time.monotonic()
            store.set(f"{self._prefix}/{self._world.rank}", f"{count} {tick} {host} {os.getpid()}")
            for rank, peer in peers.items():
                if store.check([f"{self._prefix}/{rank}"]):
                    peer.read(store.get(f"{self._prefix}/{rank}"))
            if time.monotonic() - self._since > self._timeout and (hanging := self._hanging(peers, count)):
                self._end(hanging, peers)

    def _hanging(self, peers: dict[int, _Peer], count: int) -> list[int]:
        """Return the ranks that the others wait for; [] if that is this one."""
        stopped = [rank for rank, peer in peers.items() if time.monotonic() - peer.seen > self._timeout / 2]
        behind = min(peer.exchanges for peer in peers.values())
        return stopped or [rank for rank, peer in peers.items() if peer.exchanges == behind < count]

    def _end(self, hanging: list[int], peers: dict[int, _Peer]) -> None:
        """Name the processes that hang, and end them, where they are on this machine, and this one."""
        names = " and ".join(f"{rank} (host {peers[rank].host}, process {peers[rank].pid})" for rank in hanging)
        message = (
            f"rank {names} has not gone on for {self._timeout:g} s while rank {self._world.rank} waits "
            "(train.rank_timeout); look at that process and its machine, then go on with --resume"
        )
        sys.stderr.write(f"error: {message}\n")  # here, since the processes may be started again
        sys.stderr.flush()
        hand_over(TOLD)
        for rank in hanging:
            if peers[rank].host == socket.gethostname() and peers[rank].pid:
                with suppress(OSError):
                    os.kill(peers[rank].pid, signal.SIGKILL)
        os._exit(USER_ERROR)
