import asyncio
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from services.common.errors import UserError
from services.launcher.children import Child, ChildSpec, RestartPolicy, Supervisor
from services.launcher.errors import RunFailed
from tests.services.launcher.processes import alive, pids_in, until, wait_until

FAKE = Path(__file__).with_name("fake_child.py")
QUICK = RestartPolicy(base_s=0.01, max_s=0.02)


def fake(
    behaviour: str, folder: Path, *, name: str = "scorer-0", ends_run: bool = False, tier: int = 0
) -> ChildSpec:
    folder.mkdir(exist_ok=True)
    return ChildSpec(
        name=name,
        argv=(sys.executable, "-I", "-S", str(FAKE), behaviour, str(folder)),
        env=dict(os.environ),
        log=folder / "logs" / f"{name}.log",
        tier=tier,
        announce=folder / f"{name}.json",
        ends_run=ends_run,
    )


async def test_a_dead_child_is_started_again_and_its_old_announcement_is_gone(
    tmp_path: Path,
) -> None:
    spec = fake("crash twice", tmp_path)
    assert spec.announce is not None
    spec.announce.write_text("{}")
    async with Supervisor(QUICK) as supervisor:
        child = supervisor.start(spec)
        await until((tmp_path / "up").exists)
        assert child.restarts == 2
        assert child.last_death == "exited with status 1"
        assert not spec.announce.exists()
        assert not supervisor.over.done()
    assert not any(alive(pid) for pid in pids_in(tmp_path / "pids"))


async def test_a_killed_child_comes_back_and_leaves_no_descendant(tmp_path: Path) -> None:
    async with Supervisor(QUICK) as supervisor:
        child = supervisor.start(fake("parent", tmp_path))
        await until((tmp_path / "up").exists)
        first, grandchild = pids_in(tmp_path / "pids")
        os.kill(first, signal.SIGKILL)
        await until(lambda: child.restarts == 1 and len(pids_in(tmp_path / "pids")) == 4)
        await until(lambda: not alive(grandchild))
        assert child.last_death == "was killed by SIGKILL"
    assert not any(alive(pid) for pid in pids_in(tmp_path / "pids"))


async def test_a_child_that_keeps_dying_fails_the_run_with_its_last_error(tmp_path: Path) -> None:
    spec = fake("crash", tmp_path, name="generator-1")
    async with Supervisor(QUICK) as supervisor:
        child = supervisor.start(spec)
        with pytest.raises(RunFailed) as caught:
            await supervisor.over
        assert child.starts == QUICK.most + 1
    message = str(caught.value)
    assert message.startswith("generator-1 died 6 times within ")
    assert "the last time it exited with status 1: RuntimeError" in message
    assert "RuntimeError: the engine is dead" in message
    assert str(spec.log) in message
    assert "\n" not in message


def runs_again(child: Child, *, starts: int) -> bool:
    return child.starts == starts and child.process is not None


async def test_slow_deaths_count_as_long_as_it_was_never_ready(tmp_path: Path) -> None:
    policy = RestartPolicy(most=1, window_s=0.0, base_s=0.01, max_s=0.02)
    async with Supervisor(policy) as supervisor:
        supervisor.start(fake("crash", tmp_path))
        with pytest.raises(RunFailed, match="died 2 times"):
            await supervisor.over
    async with Supervisor(policy) as supervisor:
        child = supervisor.start(fake("sleep", tmp_path))
        for starts in (1, 2, 3):
            await until(partial(runs_again, child, starts=starts))
            child.ready = True
            assert child.process is not None
            child.process.kill()
        await until(lambda: child.restarts == 3)
        assert not supervisor.over.done()


async def test_a_users_mistake_ends_the_run_in_the_childs_own_words(tmp_path: Path) -> None:
    async with Supervisor(QUICK) as supervisor:
        supervisor.start(fake("sleep", tmp_path / "other"))
        child = supervisor.start(fake("mistake", tmp_path, name="trainer-0", ends_run=True))
        with pytest.raises(UserError, match=r"^model\.path: there is no folder x; give one$"):
            await supervisor.over
        assert child.starts == 1
    assert not any(alive(pid) for pid in pids_in(tmp_path / "other" / "pids"))


async def test_a_fenced_child_is_not_started_again(tmp_path: Path) -> None:
    async with Supervisor(QUICK) as supervisor:
        child = supervisor.start(fake("fenced", tmp_path, name="trainer-0", ends_run=True))
        with pytest.raises(RunFailed, match="trainer-0 was replaced: attempt 2 has taken over"):
            await supervisor.over
        assert child.starts == 1


async def test_the_trainers_end_is_the_runs_end(tmp_path: Path) -> None:
    async with Supervisor(QUICK) as supervisor:
        worker = supervisor.start(fake("sleep", tmp_path / "worker", name="generator-0"))
        keeper = supervisor.start(fake("sleep", tmp_path / "keeper", name="aggregator-0", tier=1))
        await until(lambda: worker.process is not None and keeper.process is not None)
        supervisor.start(fake("done", tmp_path, name="trainer-0", ends_run=True))
        await supervisor.over
        await supervisor.stop(0, grace_s=10)
        assert worker.process is None
        assert keeper.process is not None
        assert worker.starts == 1


async def test_a_failed_trainer_is_started_again_as_any_other(tmp_path: Path) -> None:
    async with Supervisor(QUICK) as supervisor:
        child = supervisor.start(fake("crash twice", tmp_path, name="trainer-0", ends_run=True))
        await until((tmp_path / "up").exists)
        assert child.restarts == 2
        assert not supervisor.over.done()


async def test_what_does_not_stop_in_time_is_killed_with_its_descendants(tmp_path: Path) -> None:
    async with Supervisor(QUICK) as supervisor:
        supervisor.start(fake("stubborn parent", tmp_path))
        await until((tmp_path / "up").exists)
        await supervisor.stop(0, grace_s=0.1)
        pids = pids_in(tmp_path / "pids")
        assert len(pids) == 2
        assert not any(alive(pid) for pid in pids)


async def test_stopping_does_not_wait_for_a_back_off(tmp_path: Path) -> None:
    slow = RestartPolicy(base_s=500, max_s=1000)
    async with Supervisor(slow) as supervisor:
        child = supervisor.start(fake("crash", tmp_path))
        await until(lambda: child.last_death != "" and child.process is None)
        await asyncio.wait_for(supervisor.stop(0, grace_s=60), 30)
        assert child.starts == 1


async def test_a_program_that_cannot_be_started_fails_the_run(tmp_path: Path) -> None:
    spec = ChildSpec(
        name="queue", argv=("/does/not/exist",), env={}, log=tmp_path / "q.log", tier=2
    )
    async with Supervisor(QUICK) as supervisor:
        supervisor.start(spec)
        with pytest.raises(OSError, match="/does/not/exist"):
            await supervisor.over


LAUNCHER = """
import asyncio, sys
from pathlib import Path
from services.launcher.children import Supervisor
from tests.services.launcher.test_children import fake

async def main():
    async with Supervisor() as supervisor:
        supervisor.start(fake("stubborn parent", Path(sys.argv[1])))
        await supervisor.over

asyncio.run(main())
"""


def test_nothing_outlives_a_sigkilled_launcher(tmp_path: Path) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path)])
    try:
        wait_until((tmp_path / "up").exists)
        pids = pids_in(tmp_path / "pids")
        assert len(pids) == 2
        assert all(alive(pid) for pid in pids)
    finally:
        launcher.kill()
        launcher.wait()
    wait_until(lambda: not any(alive(pid) for pid in pids))
