from planner import Plan, PlanError

HOUSE = [
    ("doors", 2, ["walls"]),
    ("floor", 3, []),
    ("garden", 4, []),
    ("paint", 3, ["doors", "roof"]),
    ("roof", 6, ["walls"]),
    ("walls", 5, ["floor"]),
]


def planned(jobs):
    plan = Plan()
    for name, hours, after in jobs:
        plan.add(name, hours, after)
    return plan


def refused(function, *given):
    try:
        function(*given)
    except PlanError:
        return True
    return False


def test_an_empty_plan():
    assert Plan().order() == []
    assert Plan().hours() == 0
    assert Plan().starts() == {}


def test_the_order_keeps_what_comes_after():
    order = planned(HOUSE).order()
    assert sorted(order) == sorted(name for name, _, _ in HOUSE)
    assert all(order.index(other) < order.index(name) for name, _, after in HOUSE for other in after)


def test_the_order_is_by_the_alphabet_where_it_is_free():
    assert planned([("c", 1, []), ("a", 1, []), ("b", 1, ["c"])]).order() == ["a", "c", "b"]


def test_planning_twice_is_refused():
    assert refused(planned([("a", 1, [])]).add, "a", 2)


def test_negative_hours_are_refused():
    assert refused(Plan().add, "a", -1)
    assert planned([("a", 0, [])]).hours() == 0


def test_waiting_for_nobody_is_refused():
    assert refused(planned([("a", 1, ["ghost"])]).order)


def test_circles_are_refused():
    assert refused(planned([("a", 1, ["b"]), ("b", 1, ["c"]), ("c", 1, ["a"])]).order)
    assert refused(planned([("a", 1, ["a"])]).order)


def test_starts():
    assert planned(HOUSE).starts() == {"floor": 0, "garden": 0, "walls": 3, "doors": 8, "roof": 8, "paint": 14}


def test_the_last_of_several_decides():
    jobs = [("a", 2, []), ("b", 7, []), ("c", 1, ["a", "b"])]
    assert planned(jobs).starts()["c"] == 7


def test_hours_in_all():
    assert planned(HOUSE).hours() == 17
    assert planned([("a", 4, []), ("b", 9, [])]).hours() == 9


def test_slack():
    assert planned(HOUSE).slack() == {"floor": 0, "garden": 13, "walls": 0, "doors": 4, "roof": 0, "paint": 0}


def test_slack_before_the_earliest_follower():
    jobs = [("a", 1, []), ("b", 5, ["a"]), ("c", 2, ["a"]), ("d", 3, [])]
    assert planned(jobs).slack() == {"a": 0, "b": 0, "c": 3, "d": 3}


def test_critical():
    assert planned(HOUSE).critical() == ["floor", "walls", "roof", "paint"]


def test_critical_jobs_at_once():
    assert planned([("b", 2, []), ("a", 2, []), ("c", 1, [])]).critical() == ["a", "b"]


def test_needs():
    assert planned(HOUSE).needs("paint") == ["doors", "floor", "roof", "walls"]
    assert planned(HOUSE).needs("garden") == []


def test_needs_of_nobody_are_refused():
    assert refused(planned(HOUSE).needs, "ghost")


def test_one_worker_does_all_in_order():
    plan = planned([("a", 2, []), ("b", 3, []), ("c", 1, ["a"])])
    assert plan.shared(1) == [("a", 0, 0), ("b", 0, 2), ("c", 0, 5)]


def test_two_workers():
    plan = planned([("a", 2, []), ("b", 3, []), ("c", 1, ["b"])])
    assert plan.shared(2) == [("a", 0, 0), ("b", 1, 0), ("c", 0, 3)]


def test_workers_wait_for_each_other():
    plan = planned([("a", 4, []), ("b", 1, ["a"]), ("c", 2, [])])
    assert plan.shared(2) == [("a", 0, 0), ("b", 0, 4), ("c", 1, 0)]


def test_no_worker_is_refused():
    assert refused(planned(HOUSE).shared, 0)
    assert len(planned(HOUSE).shared(1)) == 6


def test_busy():
    assert planned(HOUSE).busy(1) == [23]
    assert sum(planned(HOUSE).busy(3)) == 23
    assert planned([("a", 2, []), ("b", 3, []), ("c", 1, ["b"])]).busy(2) == [3, 3]
