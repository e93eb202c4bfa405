"""A fresh database for every chain: our copies in memory, compared with straightforward alternatives.

    python -m benchmarks.sql [--quick]

Each method creates a writable copy, runs one query, writes to it, and discards it. Milliseconds of CPU time and of
wall-clock time, in one thread; files are in the default temporary folder. With AGENTFLY_DATA, Spider's largest database
is measured too.
"""

import argparse
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from agentfly.environments.sql import SQL, spider_tasks
from agentfly.environments.sql.database import Database
from agentfly.environments.sql.images import load_image
from benchmarks.table import print_table

HEADER = ["database", "KB", "way", "ms, CPU", "ms, clock", "against ours"]
TABLES = "SELECT COUNT(*) FROM sqlite_schema"
WRITE = "CREATE TABLE written (a)"


def use_and_close(connection: sqlite3.Connection) -> None:
    """Make the minimal use that a chain makes of a database, and close it."""
    connection.execute(TABLES).fetchall()
    connection.execute(WRITE)
    connection.commit()
    connection.close()


def copy_methods(image: bytes, folder: Path) -> dict[str, Callable[[], None]]:
    """The methods to create a fresh copy, by name."""
    original, copy = folder / "original.sqlite", folder / "copy.sqlite"
    original.write_bytes(image)
    source = sqlite3.connect(original)
    script = "\n".join(source.iterdump())

    def ours() -> None:
        database = Database(image, seconds=2.0)
        database.run(TABLES, 10)
        database.run(WRITE, 10)
        database.close()

    def file() -> None:
        shutil.copyfile(original, copy)
        use_and_close(sqlite3.connect(copy))

    def backup() -> None:
        connection = sqlite3.connect(":memory:")
        source.backup(connection)
        use_and_close(connection)

    def dump() -> None:
        connection = sqlite3.connect(":memory:")
        connection.executescript(script)
        use_and_close(connection)

    names = (
        "ours: image into memory, with authorizer and limits",
        "backup of an open file",
        "copy of the file",
        "SQL dump",
    )
    return dict(zip(names, (ours, backup, file, dump), strict=True))


def measure(way: Callable[[], None], times: int) -> tuple[float, float]:
    """Milliseconds of CPU time and of wall-clock time."""
    way()
    cpu, clock = time.process_time(), time.perf_counter()
    for _ in range(times):
        way()
    return 1000 * (time.process_time() - cpu) / times, 1000 * (time.perf_counter() - clock) / times


def rows(name: str, image: bytes, times: int) -> list[list[str]]:
    """One row per method."""
    with tempfile.TemporaryDirectory() as folder:
        measured = {way: measure(function, times) for way, function in copy_methods(image, Path(folder)).items()}
    (_, first_clock), size = next(iter(measured.values())), len(image) // 1024
    return [
        [name, str(size), way, f"{cpu:.2f}", f"{clock:.2f}", f"{clock / first_clock:.1f}×"]
        for way, (cpu, clock) in measured.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    times = 20 if parser.parse_args().quick else 500
    databases = {"drawn, level 3": SQL.draw_tasks("train", 1, levels=(3,))[0]["database"]}
    if "AGENTFLY_DATA" in os.environ:
        spider = {row["database"]["spider"] for row in spider_tasks("test")}
        largest = max(spider, key=lambda name: (len(load_image({"spider": name})), name))
        databases[f"Spider, {largest}"] = {"spider": largest}
    table = [line for name, column in databases.items() for line in rows(name, load_image(column), times)]
    print_table("A fresh copy of a database, used once", HEADER, table)


if __name__ == "__main__":
    main()
