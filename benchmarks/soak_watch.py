"""What benchmarks/soak.py reads of a run: memory of its processes, its streams, its ledger."""

import json
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import demo
import httpx
import psutil
import redis
from growth import Memory

from services.common.queue import Keys
from services.launcher import embedded_queue

STREAMS = ("requests", "groups", "samples", "outstanding", "dead")


@dataclass
class Watch:
    """Everything that was seen."""

    memory: dict[str, Memory] = field(default_factory=lambda: defaultdict(Memory))
    streams: list[dict[str, float]] = field(default_factory=list)
    unbalanced: int = 0
    """Looks at the aggregator's ledger that found it not balanced."""
    ledgers: int = 0
    trained: int = 0
    """Groups, as the aggregator knew last."""

    def look(self, root: psutil.Process, place: Path, run: str, *, at_s: float) -> None:
        """One look at a run that `root` has launched; what does not answer is left out."""
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
                kind = "launcher" if process == root else demo.kind_of(process)
                if kind is not None:
                    life = (process.pid, process.create_time())
                    pss_mib = process.memory_full_info().pss / (1 << 20)
                    self.memory[kind].lives[life].append((at_s, pss_mib))
        self._streams(place, run, at_s=at_s)
        self._ledger(place, run)

    def _streams(self, place: Path, run: str, *, at_s: float) -> None:
        url = embedded_queue.configured_url(place / "queue")
        if url is None:
            return
        keys = Keys(run)
        with suppress(redis.RedisError, OSError), redis.Redis.from_url(url) as client:
            seen = {
                name: float(client.hlen(getattr(keys, name)))
                if name == "outstanding"
                else float(client.xlen(getattr(keys, name)))
                for name in STREAMS
            }
            used_mib = client.info("memory")["used_memory"] / (1 << 20)
            self.streams.append({"at_s": at_s, "server_mib": used_mib, **seen})

    def _ledger(self, place: Path, run: str) -> None:
        with suppress(OSError, ValueError, httpx.HTTPError):
            port = json.loads((place / "ports" / "aggregator-0.json").read_text())["http_port"]
            answer = httpx.get(
                f"http://127.0.0.1:{port}/api/v1/runs/{run}/ledger", trust_env=False, timeout=5
            )
            if answer.is_success:
                ledger = answer.json()
                self.ledgers += 1
                self.unbalanced += not ledger["balanced"]
                self.trained = max(self.trained, ledger["trained"])
