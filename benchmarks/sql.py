"""A fresh database for every chain: our copies in memory, against the ways that come to mind first.

    python -m benchmarks.sql [--quick]

Each way makes a copy that can be written to, asks it one question, writes a row, and is rid of it. Milliseconds are of
CPU time and of the clock, in one thread; files lie in the usual temporary folder. With AGENTFLY_DATA, Spider's largest
database is measured too.
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


def used(connection: sqlite3.Connection) -> None:
    """What a chain does at least."""
    connection.execute(TABLES).fetchall()
    connection.execute(WRITE)
    connection.commit()
    connection.close()


def ways(image: bytes, folder: Path) -> dict[str, Callable[[], None]]:
    """The ways to a fresh copy."""
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
        used(sqlite3.connect(copy))

    def backup() -> None:
        connection = sqlite3.connect(":memory:")
        source.backup(connection)
        used(connection)

    def dump() -> None:
        connection = sqlite3.connect(":memory:")
        connection.executescript(script)
        used(connection)

    names = (
        "ours: image into memory, with authorizer and limits",
        "backup of an open file",
        "copy of the file",
        "SQL dump",
    )
    return dict(zip(names, (ours, backup, file, dump), strict=True))


def timed(way: Callable[[], None], times: int) -> tuple[float, float]:
    """Milliseconds of CPU time and of the clock."""
    way()
    cpu, clock = time.process_time(), time.perf_counter()
    for _ in range(times):
        way()
    return 1000 * (time.process_time() - cpu) / times, 1000 * (time.perf_counter() - clock) / times


def rows(name: str, image: bytes, times: int) -> list[list[str]]:
    """A line for each way."""
    with tempfile.TemporaryDirectory() as folder:
        found = {way: timed(function, times) for way, function in ways(image, Path(folder)).items()}
    (_, ours), size = next(iter(found.values())), len(image) // 1024
    return [
        [name, str(size), way, f"{cpu:.2f}", f"{clock:.2f}", f"{clock / ours:.1f}×"]
        for way, (cpu, clock) in found.items()
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
