"""Search matches stems, ranks by BM25, and is deterministic."""

from concurrent.futures import ThreadPoolExecutor

from agentfly.environments.webshop.shop import MAX_QUERY_LENGTH, SearchIndex

TEXTS = ["red shoes for running", "the men's shoe 10.5 wide", "a blue hat", "red red hat", ""]


def test_stems_stop_words_and_possessives():
    index = SearchIndex(TEXTS)
    assert index.search("shoe", 9) == [0, 1] or index.search("shoe", 9) == [1, 0]
    assert index.search("MEN", 9) == [1]
    assert index.search("the a for", 9) == []
    assert index.search("10.5", 9) == [1]
    assert index.search("5", 9) == []


def test_ranking_and_limit():
    index = SearchIndex(TEXTS)
    assert index.search("red", 9) == [3, 0]
    assert index.search("red hat", 1) == [3]
    assert index.search("nowhere", 9) == []


def test_ties_go_to_the_first():
    assert SearchIndex(["same words"] * 20).search("words", 5) == [0, 1, 2, 3, 4]


def test_word_without_a_stem_is_unchanged():
    assert SearchIndex([*TEXTS, "size s"]).search("s", 9) == [5]
    assert SearchIndex(TEXTS).search("s", 9) == []


def test_no_texts_or_empty_ones():
    assert SearchIndex([]).search("x", 5) == []
    assert SearchIndex(["", "the"]).search("the", 5) == []


def test_a_huge_query_is_read_to_a_limit():
    index = SearchIndex(TEXTS)
    assert index.search("x " * 500_000, 5) == []
    assert index.search("y " * (MAX_QUERY_LENGTH // 2) + "hat", 5) == []


def test_threads_do_not_disturb_each_other():
    index = SearchIndex([f"word{n} running jumping" for n in range(50)])
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda n: index.search(f"word{n % 50}", 1), range(2000)))
    assert results == [[n % 50] for n in range(2000)]
