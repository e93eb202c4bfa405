"""`@reward`: parameters are filled by name, and only finite numbers are accepted."""

import asyncio
import decimal
import fractions
import functools
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from agentfly import Environment, Task, reward, tool
from agentfly.errors import ConfigError, EnvironmentFault, RewardFault
from agentfly.resources import Leases, ResourceManager
from agentfly.rewards.composition import Product
from agentfly.scoring import MAX_PREDICTION, Reward, Scorer
from agentfly.segment import Author, Segment
from agentfly.tooling import Context
from agentfly.trajectory import Score, ScoreComponent, StopReason, Trajectory, TurnRecord
from agentfly.types import FinishReason, Message

if TYPE_CHECKING:
    from nowhere import Nothing


class Counter(Environment):
    instances = 0

    def __init__(self) -> None:
        type(self).instances += 1
        self.shown = -1

    async def reset(self, task: Task) -> None:
        self.shown = 0

    @tool
    async def press(self) -> str:
        """Press."""
        self.shown += 1
        return str(self.shown)


class Louder(Counter):
    pass


class Other(Environment):
    pass


class Broken(Environment):
    async def start(self) -> None:
        raise OSError("no power")


ROW = {"question": "Make it show 7.", "target": 7, "difficulty": "easy"}


def chain(row: Any = ROW, turns: int = 2, prediction: str = "7") -> Trajectory:
    segment = Segment()
    segment.append(Author.TASK, [1], [Message("user", "Make it show 7."), Message("assistant", prediction)], turn=0)
    turn_records = tuple(TurnRecord(FinishReason.STOP) for _ in range(turns))
    return Trajectory(Task.of(row), (segment.seal(),), turn_records, StopReason.ANSWER, prediction, 3, 1)


async def score(spec: Any, trajectory: Trajectory | None = None, used: Any = (), leases: Leases | None = None) -> Score:
    trajectory = trajectory or chain()
    scorer = Scorer(spec, used)
    scorer.check(trajectory.task)
    context = Context(trajectory.task, trajectory.group, trajectory.chain, len(trajectory.turns))
    if leases is not None:
        return await scorer.score(trajectory, context, leases)
    async with ResourceManager().leases(trajectory.task) as new_leases:
        return await scorer.score(trajectory, context, new_leases)


def returning(value: Any, name: str = "given") -> Reward:
    return reward(name=name)(lambda: value)


# ── what it may ask for ──


async def test_every_offered_parameter_is_filled() -> None:
    got: dict[str, Any] = {}

    @reward
    def ask(prediction, final_response, trajectory, messages, task, context, target, question, difficulty):  # type: ignore[no-untyped-def]
        got.update(locals())
        return 1

    record = chain()
    assert (await score(ask, record)).total == 1.0
    assert (got["prediction"], got["final_response"], got["target"], got["difficulty"]) == ("7", "7", 7, "easy")
    assert got["trajectory"] is record
    assert got["messages"] == record.messages
    assert got["task"] is record.task
    assert got["question"] == "Make it show 7."
    assert (got["context"].chain_id, got["context"].metadata["target"]) == ("3/1", 7)


async def test_rewards_read_the_end_of_a_long_prediction() -> None:
    got: list[str] = []

    @reward
    def ask(prediction: str, final_response: str, trajectory: Trajectory) -> float:
        got.extend((prediction, final_response, trajectory.prediction))
        return 1.0

    text = "a" * MAX_PREDICTION + "b"
    await score(ask, chain(prediction=text))
    assert got == [text[1:], text[1:], text]
    await score(ask, chain(prediction=text[1:]))
    assert got[3:] == [text[1:]] * 3


async def test_reward_stays_callable_and_may_be_async() -> None:
    @reward
    def plain(prediction: str, target: int) -> float:
        """Compare."""
        return float(prediction == str(target))

    @reward(name="later")
    async def later(prediction: str) -> float:
        await asyncio.sleep(0)
        return len(prediction)

    assert plain("7", target=7) == 1.0
    assert await later("abc") == 3
    assert (plain.name, plain.__doc__, later.name) == ("plain", "Compare.", "later")
    assert ((await score(plain)).total, (await score(later)).total) == (1.0, 1.0)


async def test_kwargs_get_the_other_columns_and_only_those() -> None:
    got: dict[str, Any] = {}

    @reward
    def ask(target: int, **columns: Any) -> int:
        got.update(columns)
        return 1

    await score(ask, chain({**ROW, "context": "c", "reward": 3, "odd name": 1, "function": 2}))
    assert got == {"question": ROW["question"], "difficulty": "easy", "reward": 3, "odd name": 1, "function": 2}


async def test_defaults_fill_in_for_columns_that_are_not_there() -> None:
    @reward
    def ask(target: int = 1, tolerance: float = 0.5, *args: Any, env: Any = None) -> float:
        return target + tolerance + (0 if env is None else 100)

    assert (await score(ask)).total == 7.5


async def test_columns_with_reserved_names_are_allowed() -> None:
    row = {"question": "Q", "context": "c", "id": 5, "reward": 9, "trajectory": "t", "prediction": "p", "env": "e"}

    @reward
    def ask(context: Any, id: int, reward: int, trajectory: Any, prediction: str, task: Task, env: str) -> float:
        assert context.task is task
        assert trajectory.prediction == prediction == "7"
        assert (env, task.columns["context"], task.columns["prediction"]) == ("e", "c", "p")
        return id + reward

    assert (await score(ask, chain(row), used=[Counter])).total == 14
    messages = {"messages": [{"role": "user", "content": "Q"}], "id": 5}

    @reward
    def count(messages: Any, id: int) -> int:
        return len(messages) + id

    assert (await score(count, chain(messages))).total == 7


def score_like_trl(completions, **kwargs):  # type: ignore[no-untyped-def]
    return [1.0 for _ in completions]


def score_like_trl_with_prompts(prompts, completions, answer):  # type: ignore[no-untyped-def]
    return [1.0 for _ in completions]


def score_like_verl(data_source, solution_str, ground_truth, extra_info=None):  # type: ignore[no-untyped-def]
    return float(solution_str == ground_truth)


@pytest.mark.parametrize(
    ("function", "library"),
    [(score_like_trl, "TRL"), (score_like_trl_with_prompts, "TRL"), (score_like_verl, "verl")],
)
def test_signature_of_another_library_is_answered_with_ours(function: Callable[..., Any], library: str) -> None:
    with pytest.raises(ConfigError, match=f"'{function.__name__}' has the signature of {library}.*write prediction"):
        reward(function)
    with pytest.raises(ConfigError, match=f"signature of {library}"):
        Scorer(function)


async def test_columns_of_verl_may_be_parameters() -> None:
    row = {"question": "Q", "ground_truth": "7", "data_source": "gsm8k", "extra_info": {"index": 3}}

    @reward
    def equal(prediction: str, ground_truth: str, data_source: str, extra_info: dict[str, int]) -> float:
        return float(prediction == ground_truth and data_source == "gsm8k" and extra_info["index"] == 3)

    assert (await score(equal, chain(row))).total == 1.0


def context_as_text(context: str) -> float:
    return float("paragraph" in context)


def task_as_kind(task: str | None = None) -> float:
    return float(task == "math")


def target_as_number(target: int | None) -> float:
    return float(target == 7)


def ambiguous_env(env) -> float:  # type: ignore[no-untyped-def]
    return float(env.shown)


@pytest.mark.parametrize(
    ("function", "columns", "error"),
    [
        (context_as_text, {"context": "a paragraph"}, r"receives the Context of the chain.*task\.columns\['context'\]"),
        (task_as_kind, {"task": "math"}, r"receives the Task of the chain.*task\.columns\['task'\]"),
        (target_as_number, {"target": "7"}, "receives the text '7' of the column 'target'; convert it in the reward"),
        (ambiguous_env, {"env": "prod"}, "write env: Counter, or a type such as env: str for the column"),
    ],
)
def test_column_that_a_parameter_cannot_mean_is_refused(
    function: Callable[..., float], columns: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        Scorer(function, [Counter]).check(Task.of({"question": "Q", **columns}))


def test_shadowed_columns_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    def score_context(prediction: str, context, answer: str, trajectory: Trajectory, **columns: Any) -> float:  # type: ignore[no-untyped-def]
        return 1.0

    row = {"question": "Q", "answer": "A", "context": [["title", ["text"]]], "trajectory": "t"}
    scorer = Scorer(score_context)
    for _ in range(2):
        scorer.check(Task.of(row))
    (record,) = caplog.records
    assert "'context', 'trajectory'" in record.getMessage()
    assert "task.columns['context']" in record.getMessage()
    caplog.clear()
    scorer = Scorer(Product([score_context, lambda answer: 1.0], "product"))
    scorer.check(Task.of(row))
    assert (len(caplog.records), scorer.takes("context"), scorer.takes("tools")) == (1, True, False)
    caplog.clear()
    Scorer(lambda prediction, answer: 1.0).check(Task.of(row))
    assert not caplog.records


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda targett: 1, "reward 'r' asks for 'targett'; it may ask for context, difficulty, final_response, "),
        (lambda env: 1, "reward 'r' asks for 'env'; it may ask for context"),
        (lambda answer: 1, "messages, prediction, question, target, task, trajectory$"),
        (lambda self: 1, "asks for 'self'"),
    ],
)
def test_unknown_parameter_is_rejected(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Scorer(reward(name="r")(function)).check(chain().task)


def test_positional_only_parameter_is_rejected() -> None:
    with pytest.raises(ConfigError, match="reward 'first': 'prediction' is passed by name"):

        @reward
        def first(prediction: str, /) -> float:
            return 1.0


def test_type_checking_only_hint_is_ignored() -> None:
    @reward
    def hinted(prediction: "Nothing", env: Counter) -> "Nothing":
        return 1.0

    assert hinted.environments == {"env": Counter}
    Scorer(hinted).check(chain().task)


# ── environments ──


@pytest.mark.parametrize("annotated", [True, False])
async def test_reward_receives_the_instance_of_the_chain(annotated: bool) -> None:
    seen: list[Any] = []

    @reward
    def by_type(world: Counter, target: int) -> float:
        seen.append(world)
        return float(world.shown == target)

    @reward
    def by_name(env, target: int) -> float:  # type: ignore[no-untyped-def]
        seen.append(env)
        return float(env.shown == target)

    trajectory, manager = chain(), ResourceManager()
    async with manager.leases(trajectory.task) as leases:
        world = await leases.get(Counter)
        world.shown = 7
        assert (await score(by_type if annotated else by_name, trajectory, [Counter], leases)).total == 1.0
        assert seen == [world]
    assert [pool.leased for pool in manager.pool_metrics()] == [0]


async def test_unused_environment_is_leased_and_reset_for_the_reward() -> None:
    @reward
    def untouched(env: Counter) -> float:
        return env.shown

    earlier_instances = Counter.instances
    assert (await score(untouched, used=[Counter])).total == 0
    assert (await score(untouched)).total == 0
    assert Counter.instances == earlier_instances + 2


async def test_a_reward_for_an_environment_gets_the_subclass_that_is_used() -> None:
    @reward
    def which(env: Counter) -> dict[str, Any]:
        return {"reward": 1, "kind": type(env).__name__}

    @reward
    def whichever(env: Environment) -> dict[str, Any]:
        return {"reward": 1, "kind": type(env).__name__}

    assert (await score(which, used=[Louder, Other])).metrics["kind"] == "Louder"
    assert (await score(whichever, used=[Louder])).metrics["kind"] == "Louder"


def test_ambiguous_environment_is_rejected() -> None:
    @reward
    def bare(env) -> float:  # type: ignore[no-untyped-def]
        return 1.0

    with pytest.raises(ConfigError, match="reward 'bare' asks for Environment, which may be any of Counter, Other"):
        Scorer(bare, [Counter, Other]).check(chain().task)


async def test_an_environment_that_cannot_start_is_an_environment_fault() -> None:
    @reward
    def needs(env: Broken) -> float:
        return 1.0

    with pytest.raises(EnvironmentFault, match=r"Broken\.start failed: OSError: no power"):
        await score(needs)


# ── numbers ──


class Duck:
    """As torch's scalars are: no number, but float() takes it."""

    def __float__(self) -> float:
        return 0.5


class Tensor(list[float]):
    """As torch's vectors are."""

    ndim = 1

    def tolist(self) -> list[float]:
        return list(self)


@pytest.mark.parametrize(
    ("value", "total"),
    [
        (1, 1.0),
        (0.25, 0.25),
        (True, 1.0),
        (False, 0.0),
        (-3, -3.0),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        (Duck(), 0.5),
        (decimal.Decimal("0.5"), 0.5),
        (fractions.Fraction(1, 2), 0.5),
    ],
    ids=lambda value: f"{type(value).__name__} {value!r:.6}",
)
async def test_every_kind_of_number_is_a_reward(value: object, total: float) -> None:
    for returned in (value, {"reward": value}):
        got = await score(returning(returned))
        assert (got.total, got.per_turn) == (total, None)
        assert type(got.total) is float


@pytest.mark.parametrize(
    "value",
    [None, "1.0", b"1", float("nan"), float("inf"), 1e308, -1e31, 10**400, 1j, object(), {1, 2}, {"score": 1}, {},
     {"reward": None}, {"reward": "x"}, [1.0], [1, 2, 3], [1, None], [1, float("nan")], [1e308, 1e308],
     np.array([np.nan, 1]), [[1], [2]], (n for n in [1, 2]), b"ab"],
    ids=lambda value: f"{type(value).__name__} {value!r:.6}",
)  # fmt: skip
async def test_invalid_return_value_is_a_reward_fault(value: object) -> None:
    with pytest.raises(RewardFault, match="reward 'given'"):
        await score(returning(value))


@pytest.mark.parametrize("value", [[0.25, 1], (0.25, 1), np.array([0.25, 1]), {"reward": [0.25, 1]}, Tensor([0.25, 1])])
async def test_one_number_per_turn(value: object) -> None:
    got = await score(returning(value))
    assert (got.total, got.per_turn) == (1.25, (0.25, 1.0))


async def test_weighted_sum_that_is_too_large_is_a_reward_fault() -> None:
    first, second = returning(1e30, "first"), returning(1e30, "second")
    for rewards in ({first: 2.0}, {first: 1.0, second: 1.0}):
        with pytest.raises(RewardFault, match=r"the weighted sum of the rewards: a score must be finite"):
            await score(rewards)


async def test_number_that_is_not_finite_is_none_in_the_metrics() -> None:
    got = await score(returning({"reward": 1, "aux": float("nan"), "parts": np.array([1, np.inf])}))
    assert got == Score(1.0, None, {"aux": None, "parts": [1, None]})
    assert Score.from_json(json.loads(json.dumps(got.to_json()))) == got


async def test_wrong_number_of_turn_rewards_is_a_fault() -> None:
    with pytest.raises(RewardFault, match="returned 3 numbers for a chain of 2 turns"):
        await score(returning([1, 2, 3]))
    assert (await score(returning([]), chain(turns=0))).per_turn == ()


async def test_other_keys_of_a_dict_are_metrics() -> None:
    got = await score(returning({"reward": 1, "exact": np.float32(0.5), "parts": (1, 2), "note": "ok"}))
    assert got == Score(1.0, None, {"exact": 0.5, "parts": [1, 2], "note": "ok"})
    assert type(got.metrics["exact"]) is float
    with pytest.raises(RewardFault, match="a dict without 'reward'; it has 'score', 'x'"):
        await score(returning({"score": 1, "x": 2}))


# ── several ──


async def test_rewards_are_summed_by_weight() -> None:
    one = returning({"reward": 1, "exact": True}, "one")
    half = returning(0.5, "half")
    components = {"one": ScoreComponent(1.0, 1.0), "half": ScoreComponent(1.0, 0.5)}
    assert await score([one, half]) == Score(1.5, None, {"one": 1.0, "one/exact": True, "half": 0.5}, components)
    assert (await score({one: 2, half: -1.0})).total == 1.5
    assert await score({one: 0.5}) == Score(0.5, None, {"exact": True})
    assert (await score({returning([1, 2], "turns"): 0.5})).per_turn == (0.5, 1.0)


async def test_reward_of_the_chain_counts_at_its_last_turn() -> None:
    got = await score({returning([1, 2], "turns"): 1.0, returning(10, "whole"): 0.1})
    assert (got.total, got.per_turn) == (4.0, (1.0, 3.0))
    assert got.metrics == {"turns": 3.0, "whole": 10.0}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (Counter, "is not a reward; pass a function"),
        ([], "an empty list of rewards"),
        ("no_such_reward", "no reward is named 'no_such_reward'"),
        ([returning(1, "same"), returning(2, "same")], "two rewards have the same name among same, same"),
        ({returning(1): float("nan")}, "weight of reward .* must be a finite number, not nan"),
        ({returning(1): "2"}, "weight of reward .*'2'"),
        ([(returning(1), 0.5)], "is not a reward"),
    ],
)
def test_invalid_reward_spec_is_rejected(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Scorer(spec)


@pytest.mark.parametrize("value", [7, Counter, "name"])
def test_only_a_function_can_be_made_a_reward(value: Any) -> None:
    with pytest.raises(ConfigError, match="cannot be made a reward"):
        reward(value)


def near(prediction: str, target: "int", tolerance: float) -> float:
    return float(abs(float(prediction) - target) <= tolerance)


class Near:
    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.name = self.parameters = "not those of the reward"

    def __call__(self, prediction: str, target: int) -> float:
        return near(prediction, target, self.tolerance)


class Pressed:
    async def __call__(self, env: "Counter", **columns: Any) -> dict[str, float]:
        return {"reward": env.shown, "columns": len(columns)}


@pytest.mark.parametrize(
    ("spec", "name", "total"),
    [
        (functools.partial(near, tolerance=1.0), "near", 1.0),
        (functools.partial(functools.partial(near, tolerance=1.0), tolerance=0.0), "near", 1.0),
        (Near(0.5), "Near", 1.0),
        (reward(name="close")(functools.partial(near, tolerance=1.0)), "close", 1.0),
        (functools.partial(reward(near), tolerance=1.0), "near", 1.0),
        (Pressed(), "Pressed", 0.0),
    ],
)
async def test_partial_or_object_is_a_reward(spec: Any, name: str, total: float) -> None:
    scorer = Scorer(spec)
    assert [reward_of_scorer.name for reward_of_scorer, _ in scorer.rewards] == [name]
    assert (await score(spec)).total == total


async def test_bound_argument_of_a_partial_is_no_column() -> None:
    scorer = Scorer(functools.partial(near, target=7, tolerance=0.0))
    assert list(scorer.rewards[0][0].parameters) == ["prediction"]
    assert (await score(functools.partial(near, target=8, tolerance=0.5))).total == 0.0  # the row's target is 7


async def test_returned_tuple_is_reported_whole() -> None:
    with pytest.raises(RewardFault, match=r"reward 'pair' returned \(1\.0, \{'exact': True\}\); it may return"):
        await score(returning((1.0, {"exact": True}), "pair"))


async def test_one_of_several_rewards_abstains_with_none() -> None:
    scored = await score([returning(None, "none"), returning(0.5, "half")])
    assert scored == Score(0.5, None, {"half": 0.5}, {"half": ScoreComponent(1.0, 0.5)})
    scored = await score([returning({"reward": None, "cost": 2}, "none"), returning(0.5, "half")])
    assert scored.metrics == {"none/cost": 2, "half": 0.5}
    with pytest.raises(RewardFault, match="reward 'a' returned None"):
        await score([returning(None, "a"), returning(None, "b")])


async def test_fault_of_one_reward_keeps_the_metrics_of_the_others() -> None:
    with pytest.raises(RewardFault, match="reward 'text' returned 'x'") as caught:
        await score([returning("x", "text"), returning({"reward": 1, "exact": True}, "one")])
    assert caught.value.metrics == {"one": 1.0, "one/exact": True}


async def test_rewards_run_concurrently() -> None:
    started = asyncio.Event()

    @reward
    async def first() -> float:
        await asyncio.wait_for(started.wait(), 10)
        return 1.0

    @reward
    async def second() -> float:
        started.set()
        return 1.0

    assert (await score([first, second])).total == 2.0


# ── failures ──


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    "error", [ValueError("bad"), SystemExit(1), asyncio.CancelledError(), StopIteration()], ids=repr
)
async def test_a_reward_that_raises_is_a_reward_fault(is_async: bool, error: BaseException) -> None:
    @reward(name="broken")
    def plain() -> float:
        raise error

    @reward(name="broken")
    async def coroutine() -> float:
        raise error

    with pytest.raises(RewardFault, match="reward 'broken' failed: "):
        await score(coroutine if is_async else plain)


async def test_reward_may_raise_reward_fault() -> None:
    @reward
    def judge() -> float:
        raise RewardFault("the judge is asleep")

    with pytest.raises(RewardFault, match=r"^the judge is asleep$"):
        await score(judge)


async def test_reward_times_out() -> None:
    @reward(timeout=0.05)
    async def slow() -> float:
        await asyncio.sleep(60)
        return 1.0

    with pytest.raises(RewardFault, match=r"reward 'slow' took longer than 0\.05 s"):
        await score(slow)


def test_a_timeout_of_nothing_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="reward 'slow': timeout must be a number above 0, or None for no limit, not 0"
    ):
        reward(name="slow", timeout=0)(lambda prediction: 1.0)
