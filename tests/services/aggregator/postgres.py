"""A PostgreSQL server of the tests' own: one a session, with a new database for each test."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from tests.conftest import free_port

ACCOUNT = "postgres"
"""Whom the server runs as where tests are run by root: it refuses to be root."""


def binaries() -> Path | None:
    """The folder of the server's programs, on the PATH or where Debian puts them; None without."""
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).parent
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return debian[-1].parent if debian else None


@contextmanager
def server(programs: Path, *, password: str | None = None) -> Iterator[str]:
    """Run a server on a free loopback port, which asks for `password` where one is given; yields
    its URL up to the database's name, without it."""
    folder = Path(tempfile.mkdtemp(prefix="postgres-"))
    who: list[str] = []
    if os.geteuid() == 0:
        shutil.chown(folder, ACCOUNT)
        who = ["runuser", "-u", ACCOUNT, "--"]
    data, port = folder / "data", free_port()
    access = ["-A", "trust"]
    if password is not None:
        (folder / "password").write_text(password)
        shutil.chown(folder / "password", folder.owner())
        access = ["-A", "scram-sha-256", f"--pwfile={folder}/password"]
    try:
        subprocess.run(
            [*who, str(programs / "initdb"), "-D", str(data), "-U", "tests", *access, "-N"],
            check=True,
            capture_output=True,
            cwd=folder,
        )
        options = f"-h 127.0.0.1 -p {port} -k {folder} -c fsync=off -c max_connections=50"
        control = [*who, str(programs / "pg_ctl"), "-D", str(data), "-w"]
        log = ["-l", str(folder / "log")]
        started = [*control, *log, "-o", options, "start"]
        subprocess.run(started, check=True, stdout=subprocess.DEVNULL, cwd=folder)
        try:
            yield f"postgresql+psycopg://tests@127.0.0.1:{port}"
        finally:
            ended = [*control, "-m", "immediate", "stop"]
            subprocess.run(ended, check=True, stdout=subprocess.DEVNULL, cwd=folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def database(server_url: str, name: str) -> Iterator[str]:
    """A new, empty database; yields its URL."""
    admin = server_url.replace("postgresql+psycopg", "postgresql") + "/postgres"
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    yield f"{server_url}/{name}"
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')
