import subprocess
import sys
from pathlib import Path

from services.common.memory_folder import MemoryFolder

HOLD = """
import sys, time
from pathlib import Path
from services.common.memory_folder import MemoryFolder
folder = MemoryFolder("test", root=Path(sys.argv[1]))
(folder.path / "weights").write_bytes(b"x")
print(folder.path, flush=True)
time.sleep(60)
"""


def test_a_folder_is_removed_by_its_owner(tmp_path: Path) -> None:
    folder = MemoryFolder("test", root=tmp_path)
    (folder.path / "weights").write_bytes(b"x")
    folder.close()
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_killed_process_goes_with_the_next_one(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        mine = MemoryFolder("test", root=tmp_path)
        assert left.is_dir(), "its owner lives"
        process.kill()
        process.wait()
    other = MemoryFolder("other", root=tmp_path)
    assert left.is_dir(), "another kind is left alone"
    again = MemoryFolder("test", root=tmp_path)
    assert not left.exists()
    assert mine.path.is_dir()
    for folder in (mine, other, again):
        folder.close()
    assert list(tmp_path.iterdir()) == []
