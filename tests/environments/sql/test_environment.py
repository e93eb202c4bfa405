"""The SQL environment: through agents, tools and the resource manager."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from agentfly.agents import HFAgent
from agentfly.environment import Pool
from agentfly.environments.sql import SQL
from agentfly.environments.sql.database import Database, read_file, row_overlap
from agentfly.environments.sql.images import load_image, load_twins
from agentfly.errors import DataError
from agentfly.rewards import sql_iou, sql_match
from agentfly.sft.demonstrations import demonstrate
from agentfly.trajectory import StopReason
from agentfly.types import Task
from tests.fakes import call

SHOP = """
CREATE TABLE makers (id INTEGER PRIMARY KEY, name TEXT);
CREATE TABLE toys (id INTEGER PRIMARY KEY, name TEXT, price REAL, maker INTEGER REFERENCES makers(id));
INSERT INTO makers VALUES (1, 'Ada'), (2, 'Ben');
INSERT INTO toys VALUES (1, 'ball', 2.5, 1), (2, 'kite', 4.0, 1), (3, 'top', 1.1, 2), (4, 'ball', NULL, NULL);
"""


def row(gold: str, **columns: Any) -> dict[str, Any]:
    return {"question": "?", "gold": gold, "database": {"script": SHOP}, **columns}


async def make_env(columns: dict[str, Any], kind: type[SQL] = SQL) -> SQL:
    env = kind()
    await env.start()
    await env.reset(Task.of(columns))
    return env


async def evaluate(gold: str, query: str) -> dict[str, Any]:
    """Scores of a submitted query."""
    env = await make_env(row(gold))
    await env.submit_query(query)
    scores = await env.evaluate()
    await env.close()
    return scores


def agent_of(script: object = "-", kind: type[SQL] = SQL, reward: Any = sql_match) -> HFAgent:
    return HFAgent(
        tools=[kind], reward=reward, template="chatml", backend="scripted", backend_config={"script": script}
    )


async def test_expert_solves_64_databases_at_once() -> None:
    demonstrations = await demonstrate(agent_of(), SQL.draw_tasks("train", 64))
    assert len(demonstrations.accepted) == 64
    assert [chain.reward for chain in demonstrations.accepted] == [1.0] * 64


async def test_query_is_run_and_submitted() -> None:
    script = [
        call("sql_schema"),
        call("sql_query", query="SELECT name, price FROM toys ORDER BY id"),
        call("sql_query", query="SELEC name FROM toys"),
        call("submit_query", query="SELECT COUNT(*) FROM toys"),
        "never said",
    ]
    (chain,) = await agent_of(script).run(row("SELECT COUNT(id) FROM toys"))
    observations = [message.text for message in chain.messages if message.role == "tool"]
    assert observations[0].splitlines() == [
        "makers(id integer, name text)",
        "toys(id integer, name text, price real, maker integer)",
        "toys.maker → makers.id",
    ]
    assert observations[1] == "name | price\nball | 2.5\nkite | 4.0\ntop | 1.1\nball | NULL"
    assert observations[2] == 'Error: near "SELEC": syntax error.'
    assert (chain.stop, chain.reward) == (StopReason.TOOL_END, 1.0)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("```sql\nSELECT COUNT(*) FROM toys\n```", 1.0),
        ("SELECT COUNT(*) FROM toys", 1.0),
        ("There are 4 toys.", 0.0),
        ("4", 0.0),
        ("", 0.0),
    ],
)
async def test_query_in_the_answer_counts_if_none_was_submitted(answer: str, reward: float) -> None:
    (chain,) = await agent_of([answer]).run(row("SELECT COUNT(*) FROM toys"))
    assert chain.reward == reward


@pytest.mark.parametrize(
    ("gold", "query", "match"),
    [
        ("SELECT name FROM toys", "SELECT name FROM toys ORDER BY name DESC", True),  # the order is left open
        ("SELECT name FROM toys", "SELECT DISTINCT name FROM toys", False),  # as multisets
        ("SELECT id FROM toys ORDER BY id", "SELECT id FROM toys ORDER BY id DESC", False),
        ("SELECT id FROM (SELECT id FROM toys ORDER BY id)", "SELECT id FROM toys ORDER BY id DESC", True),
        ("SELECT 'order by' FROM toys", "SELECT 'order by' FROM toys ORDER BY id DESC", True),
        ("SELECT SUM(price) FROM toys", "SELECT SUM(price) + 1e-10 FROM toys", True),
        ("SELECT SUM(price) FROM toys", "SELECT SUM(price) + 0.01 FROM toys", False),
        ("SELECT COUNT(*) FROM toys", "SELECT COUNT(*) * 1.0 FROM toys", True),
        ("SELECT COUNT(*) FROM toys", "SELECT CAST(COUNT(*) AS TEXT) FROM toys", False),
        ("SELECT price FROM toys WHERE id = 4", "SELECT '' FROM toys WHERE id = 4", False),
        ("SELECT price FROM toys WHERE id = 4", "SELECT NULL FROM toys WHERE id = 4", True),
        ("SELECT id, name FROM toys", "SELECT id FROM toys", False),
        ("SELECT name FROM toys WHERE id = 9", "SELECT name FROM toys WHERE 9 = id", True),
        ("SELECT name FROM toys WHERE id = 9", "SELECT name FROM toys WHERE price > 9", False),  # both empty by chance
        ("SELECT name FROM toys WHERE id = 9", "SELECT 1 WHERE 0", False),
        ("SELECT name FROM toys WHERE id = 9", "SELECT id, name FROM toys WHERE 0", False),
        ("SELECT name FROM toys WHERE id = 9", "DELETE FROM toys", False),
        ("SELECT name FROM toys WHERE id = 9", "", False),
        ("SELECT name FROM toys", "SELECT name FROM toys; SELECT 1", False),
        ("SELECT COUNT(*) FROM toys", "SELECT 4", False),  # it looks at nothing
        ("SELECT COUNT(*) FROM toys", "SELECT 4 FROM toys LIMIT 1", False),  # right here, but not in a twin
        ("SELECT name FROM makers", "VALUES ('Ada'), ('Ben')", False),
        ("SELECT COUNT(*) FROM toys JOIN makers ON maker = makers.id", "SELECT COUNT(maker) FROM toys", True),
    ],
)
async def test_results_are_compared_by_the_order_of_the_gold_query(gold: str, query: str, match: bool) -> None:
    assert (await evaluate(gold, query))["match"] is match


async def test_partial_result_gets_partial_reward() -> None:
    ids = [(1,), (2,), (3,), (4,)]
    assert row_overlap(ids[1:], ids, ordered=False) == 3 / 4
    assert row_overlap([("ball",), ("top",)], [("ball",), ("ball",), ("top",)], ordered=False) == 2 / 3
    assert row_overlap([("ball",)], ids, ordered=False) == 0
    assert row_overlap(ids[::-1], ids, ordered=True) == 0  # all rows, and every pair the wrong way round
    assert row_overlap([(1,), (2,), (4,), (3,)], ids, ordered=True) == pytest.approx(
        2 / 3
    )  # one pair of six: 1 - 2 / 6
    query = "SELECT id, name FROM toys WHERE id > 1 UNION ALL SELECT 9, 'nothing' FROM makers LIMIT 9"
    (chain,) = await agent_of([query], reward=sql_iou).run(row("SELECT id, name FROM toys"))
    assert 0 <= (chain.reward or 0) <= 3 / 5  # on the database; a twin, on which it does worst, decides


ZERO = [
    "SELECT COUNT(*) FROM toys WHERE price > 1000",
    "SELECT COUNT(*) FROM toys WHERE name = 'robot'",
    "SELECT COUNT(*) FROM toys WHERE name LIKE '%robot%'",
    'SELECT COUNT(*) FROM toys WHERE name = "robot"',
    "SELECT COUNT(*) FROM toys WHERE name = 'ball' AND price < 2",
    "SELECT COUNT(*) FROM toys JOIN makers ON maker = makers.id WHERE makers.name = 'Eve'",
    "SELECT COUNT(*) FROM makers WHERE id NOT IN (SELECT maker FROM toys WHERE maker IS NOT NULL)",
    "SELECT COUNT(*) FROM orders WHERE day > '2020-01-01'",
    "SELECT EXISTS (SELECT 1 FROM toys WHERE price BETWEEN 50 AND 60)",
]
ORDERS = "CREATE TABLE orders (id INTEGER PRIMARY KEY, toy INTEGER NOT NULL REFERENCES toys(id), day TEXT);"


@pytest.mark.parametrize("gold", ZERO)
async def test_constant_zero_does_not_match_a_count_of_zero(gold: str) -> None:
    task_row = row(gold, database={"script": SHOP + ORDERS})
    table = "orders" if "orders" in gold else "toys"
    for query, match in ((f"SELECT COUNT(*) * 0 FROM {table}", False), (f"SELECT * FROM ({gold})", True)):
        env = await make_env(task_row)
        assert env._database is not None
        assert env._database.run(query, 2).rows == env._database.run(gold, 2).rows == [(0,)]
        await env.submit_query(query)
        assert (await env.evaluate())["match"] is match
        await env.close()


SAME = [
    ("SELECT COUNT(*) FROM toys", "SELECT COUNT(name) FROM toys"),
    ("SELECT COUNT(*) FROM makers", "SELECT COUNT(DISTINCT name) FROM makers"),
    ("SELECT name FROM makers ORDER BY id DESC LIMIT 1",
     "SELECT name FROM makers WHERE id = (SELECT MAX(id) FROM makers)"),
    ("SELECT COUNT(*) FROM toys WHERE price > 100", "SELECT COUNT(price) FROM toys WHERE NOT price <= 100"),
    ("SELECT COUNT(*) FROM toys WHERE name = 'x'", "SELECT COUNT(*) FROM toys GROUP BY 'x' HAVING 0 UNION ALL "
     "SELECT COUNT(id) FROM toys WHERE name IN ('x')"),
    ("SELECT maker FROM toys WHERE maker IS NOT NULL", "SELECT makers.id FROM toys JOIN makers ON maker = makers.id"),
    ("SELECT name FROM makers WHERE id IN (SELECT maker FROM toys)",
     "SELECT DISTINCT makers.name FROM makers JOIN toys ON maker = makers.id"),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "query"), SAME)
async def test_equivalent_queries_match_on_twins_with_added_rows(gold: str, query: str) -> None:
    assert (await evaluate(gold, query))["match"]


def test_twins_have_no_dangling_references() -> None:
    script = SHOP + "CREATE TRIGGER t AFTER DELETE ON toys BEGIN INSERT INTO makers VALUES (7, 'Eve'); END;"
    column, gold = {"script": script}, "SELECT COUNT(*) FROM toys JOIN makers ON maker = makers.id"
    real, *twins = (load_image(column), *load_twins(column, gold))
    assert twins == list(load_twins(column, gold))
    counts = []
    for image in (real, *twins):
        copy = Database(image, seconds=2.0)
        lost = "SELECT COUNT(*) FROM toys WHERE maker IS NOT NULL AND maker NOT IN (SELECT id FROM makers)"
        assert copy.run(lost, 1).rows == [(0,)]
        assert copy.run("SELECT COUNT(*) FROM makers WHERE name = 'Eve'", 1).rows == [(0,)]
        counts.append(copy.run("SELECT (SELECT COUNT(*) FROM toys), (SELECT COUNT(*) FROM makers)", 1).rows[0])
        copy.close()
    assert counts[0] == (4, 2)
    assert any(twin < counts[0] for twin in counts[1:])
    assert any(twin > counts[0] for twin in counts[1:])


async def test_constant_answer_gets_no_reward() -> None:
    for task_row in SQL.draw_tasks("train", 40):
        env = await make_env(task_row)
        assert env._database is not None
        answer = env._database.run(task_row["gold"], 100)
        values = ", ".join(f"({', '.join(repr(value) for value in values_row)})" for values_row in answer.rows)
        await env.submit_query(f"VALUES {values}")
        scores = await env.evaluate()
        assert (scores["match"], scores["ran"]) == (False, True)
        await env.close()


async def test_query_of_another_database_rarely_matches() -> None:
    rows = SQL.draw_tasks("train", 60, levels=(1,))
    other = {task_row["question"]: task_row["gold"] for task_row in SQL.draw_tasks("train", 1200, seed=7, levels=(1,))}
    again = [(task_row, other[task_row["question"]]) for task_row in rows if task_row["question"] in other]
    earned = []
    for task_row, remembered in again:  # the right query for the same question, of another database
        env = await make_env(task_row)
        await env.submit_query(remembered)
        earned.append((await env.evaluate())["match"])
        await env.close()
    assert len(earned) > 10
    assert sum(earned) / len(earned) < 0.4


async def test_writes_are_private_to_a_chain() -> None:
    task_row = row("SELECT COUNT(*) FROM toys")
    first, second = await make_env(task_row), await make_env(task_row)
    assert await first.sql_query("DELETE FROM toys WHERE id > 1") == "Done: 3 rows changed."
    await first.sql_query("BEGIN")
    await first.sql_query("CREATE TABLE notes (text)")
    assert await first.sql_query("SELECT COUNT(*) FROM toys") == "COUNT(*)\n1"
    assert await second.sql_query("SELECT COUNT(*) FROM toys") == "COUNT(*)\n4"
    await first.submit_query("SELECT COUNT(id) FROM toys")  # not of its own copy, where nothing is left to count
    assert (await first.evaluate())["match"]
    await first.reset(Task.of(task_row))
    assert (first.submitted, first.schema_shown) == (None, False)
    assert await first.sql_query("SELECT COUNT(*) FROM toys") == "COUNT(*)\n4"
    assert "notes" not in await first.sql_schema()


@pytest.mark.parametrize(
    "way_out",
    [
        "ATTACH '/tmp/agentfly-leak.db' AS other",
        "VACUUM INTO '/tmp/agentfly-leak.db'",
        "PRAGMA writable_schema = 1",
        "PRAGMA max_page_count = 1000000000",
        "SELECT load_extension('libm.so.6')",
        "SELECT * FROM pragma_database_list",
        "CREATE VIRTUAL TABLE v USING fts5(x)",
        "CREATE TEMP TABLE t (a)",
        "CREATE TRIGGER t AFTER DELETE ON toys BEGIN SELECT 1; END",
    ],
)
async def test_statements_that_leave_the_database_are_denied(way_out: str) -> None:
    env = await make_env(row("SELECT 1"))
    assert (await env.sql_query(way_out)).startswith("Error: ")
    assert "authoriz" in await env.sql_query(way_out)
    assert await env.sql_query("SELECT COUNT(*) FROM toys") == "COUNT(*)\n4"


class Hasty(SQL):
    seconds = 0.2


DOUBLING = ", ".join(f"c{n} AS (SELECT (SELECT a FROM c{n - 1}) + (SELECT a FROM c{n - 1}) AS a)" for n in range(1, 60))


@pytest.mark.parametrize(
    ("runaway", "observations"),
    [
        ("WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT COUNT(*) FROM c", "longer than 0.2 s"),
        (f"SELECT COUNT(*) FROM {', '.join(f'toys t{n}' for n in range(20))}", "longer than 0.2 s"),
        (f"WITH c0 AS (SELECT 1 AS a), {DOUBLING} SELECT * FROM c59", "too often"),
        (re.sub(r"c(\d+)", r'"!-\1"', f"WITH c0 AS (SELECT 1 AS a), {DOUBLING} SELECT * FROM c59"), "too often"),
        (f"WITH c0 /* ( */ AS /**/ (SELECT '--' AS a), {DOUBLING} SELECT * FROM c59", "too often"),
        ("CREATE TABLE t AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x FROM c) SELECT zeroblob(9000) FROM c",
         r"full|longer than"),
        ("SELECT randomblob(1000000000)", "too big"),
        ("SELECT printf('%.*c', 2000000000, 'x')", "not authorized"),
        (f"SELECT {'(' * 5000}1{')' * 5000}", "overflow"),
        ("SELECT 'a\0b'", "null character"),
        ("SELECT '\ud800'", "surrogate"),
    ],
)  # fmt: skip
async def test_runaway_query_is_stopped(runaway: str, observations: str) -> None:
    env = await make_env(row("SELECT 1"), Hasty)
    answer = await asyncio.wait_for(env.sql_query(runaway), 60)
    assert re.search(observations, answer), answer
    assert await env.sql_query("SELECT COUNT(*) FROM toys") == "COUNT(*)\n4"
    await env.submit_query(runaway)
    assert not (await asyncio.wait_for(env.evaluate(), 60))["match"]


async def test_running_statement_is_interrupted_by_close() -> None:
    env = await make_env(row("SELECT 1"), type("Patient", (SQL,), {"seconds": 600.0}))
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT COUNT(*) FROM c"
    running = asyncio.create_task(env.sql_query(endless))
    await asyncio.sleep(0.1)
    await asyncio.wait_for(env.close(), 60)
    assert (await running).startswith("Error: ")


async def test_malformed_calls_are_answered_and_long_results_truncated() -> None:
    strange = ['{"query": 7}', '{"query": ["SELECT 1"]}', "{}", json.dumps({"query": "x" * 1_000_000})]
    script = [f'<tool_call>{{"name": "sql_query", "arguments": {arguments}}}</tool_call>' for arguments in strange]
    long = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x, hex(zeroblob(500)) FROM c"
    script += [call("sql_query", query=long), call("sql_query", query="-- nothing"), "Enough."]
    (chain,) = await agent_of(script).run(row("SELECT 1"), max_turns=9)
    observations = [message.text for message in chain.messages if message.role == "tool"]
    assert len(observations) == 6
    assert "1000000 characters" in observations[3]
    assert len(observations[4].splitlines()) == SQL.most_rows + 2
    assert max(map(len, observations[4].splitlines())) < SQL.widest + 20
    assert observations[5] == "Done: 0 rows changed."
    assert chain.reward == 0.0


async def test_invalid_database_is_reported(tmp_path: Path) -> None:
    junk = tmp_path / "junk.sqlite"
    junk.write_bytes(b"This is no database, but a line of text. " * 50)
    bad_databases: list[tuple[object, str]] = [
        ({"script": "CREATE TABEL x"}, "script of a database fails"),
        ({"file": str(tmp_path / "nowhere.sqlite")}, "cannot be read"),
        ({"file": str(junk)}, "no SQLite database"),
        ({"drawn": "train-0-1", "level": 9}, "drawn"),
        ({"spider": "../../etc/passwd"}, "not the name of a Spider database"),
        ("toys", "may have drawn"),
    ]
    for column, observations in bad_databases:
        with pytest.raises(DataError, match=observations):
            await SQL().reset(Task.of({"question": "?", "database": column}))
    with pytest.raises(DataError, match=r"SQL\.draw_tasks"):
        await SQL().reset(Task.of("How many?"))
    env = await make_env(row("SELECT x FROM nowhere"))
    with pytest.raises(DataError, match="'gold' fails: no such table"):
        await env.evaluate("SELECT 1")


async def test_file_is_never_written(tmp_path: Path) -> None:
    path = tmp_path / "with a #?.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.executescript(SHOP)
    connection.close()
    content_before = path.read_bytes()
    env = await make_env({"question": "?", "gold": "SELECT COUNT(*) FROM toys", "database": {"file": str(path)}})
    assert await env.sql_query("DELETE FROM toys") == "Done: 4 rows changed."
    assert (await env.evaluate("SELECT COUNT(id) FROM toys"))["match"]
    assert path.read_bytes() == content_before
    assert read_file(str(path))[:15] == b"SQLite format 3"


async def test_worker_process_gives_the_same_result() -> None:
    class Apart(SQL):
        pool = Pool(runtime="process", max_instances=2)

    agent = agent_of(kind=Apart)
    demonstrations = await demonstrate(agent, SQL.draw_tasks("train", 4))
    assert len(demonstrations.accepted) == 4
    await agent.manager.close()
