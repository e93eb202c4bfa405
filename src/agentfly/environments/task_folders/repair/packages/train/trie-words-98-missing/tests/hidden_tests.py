from collections import Counter
from random import Random

from trie import Trie


def drawn(seed):
    random = Random(seed)
    return ["".join(random.choice("abc") for _ in range(random.randrange(1, 5))) for _ in range(25)]


def refused(function, *given):
    try:
        function(*given)
    except ValueError:
        return True
    return False


def test_counts_agree_with_a_counter():
    for seed in range(5):
        words, counted = Trie(drawn(seed)), Counter(drawn(seed))
        assert all(words.count(word) == counted[word] for word in counted)


def test_what_is_not_in_has_no_count():
    words = Trie(["cart"])
    assert [words.count(each) for each in ("car", "carts", "", "x")] == [0, 0, 0, 0]


def test_putting_in_several_times():
    words = Trie()
    words.insert("hut", 4)
    assert words.count("hut") == 4
    assert words.size() == 4
    assert words.size("hu") == 4


def test_nothing_cannot_be_put_in():
    assert refused(Trie().insert, "")
    assert refused(Trie().insert, "a", 0)


def test_sizes_agree_with_a_count():
    words = drawn(8)
    for prefix in ("", "a", "ab", "cba", "d"):
        assert Trie(words).size(prefix) == sum(word.startswith(prefix) for word in words)


def test_words_in_order():
    for seed in range(5):
        assert Trie(drawn(seed)).words() == sorted(set(drawn(seed)))


def test_words_that_begin_so():
    words = drawn(9)
    assert Trie(words).words("b") == sorted({word for word in words if word.startswith("b")})
    assert Trie(words).words("zz") == []


def test_removing_once():
    words = Trie(["sea", "sea", "seal"])
    assert words.remove("sea") == 1
    assert words.count("sea") == 1
    assert words.size("se") == 2


def test_removing_more_than_there_is():
    words = Trie(["sea", "sea", "seal"])
    assert words.remove("sea", 5) == 2
    assert words.words() == ["seal"]


def test_removing_what_is_not_in():
    words = Trie(["seal"])
    assert words.remove("sea") == 0
    assert words.remove("x", 3) == 0
    assert words.size() == 1


def test_removing_the_last_leaves_nothing():
    words = Trie(["tip", "top"])
    words.remove("tip")
    assert words.words() == ["top"]
    words.remove("top")
    assert (words.words(), words.size(), words.size("t")) == ([], 0, 0)


def test_removing_a_longer_word():
    words = Trie(["sea", "seal"])
    assert words.remove("seal") == 1
    assert words.words("s") == ["sea"]
    assert words.count("seal") == 0


def test_the_best_by_count():
    words = Trie(["to", "tea", "tea", "ten", "ten", "ten", "inn"])
    assert words.best("t") == ["ten", "tea", "to"]
    assert words.best("t", 1) == ["ten"]


def test_the_best_among_equals():
    assert Trie(["b", "a", "d", "c"]).best("", 4) == ["a", "b", "c", "d"]
    assert Trie(["b", "a", "d", "c"]).best("") == ["a", "b", "c"]


def test_the_longest_prefix():
    words = Trie(["in", "inn", "inner"])
    assert words.longest_prefix("innermost") == "inner"
    assert words.longest_prefix("inning") == "inn"
    assert words.longest_prefix("in") == "in"


def test_no_prefix():
    words = Trie(["in", "inn"])
    assert words.longest_prefix("i") == ""
    assert words.longest_prefix("out") == ""
    assert words.longest_prefix("") == ""


def test_patterns():
    words = Trie(["bat", "bet", "bit", "boat", "cat"])
    assert words.matches("b.t") == ["bat", "bet", "bit"]
    assert words.matches("..t") == ["bat", "bet", "bit", "cat"]


def test_patterns_that_fit_nothing():
    words = Trie(["bat", "bats"])
    assert words.matches("b") == []
    assert words.matches("b.x") == []
    assert words.matches("bat") == ["bat"]


def test_what_all_share():
    assert Trie(["flow", "flower", "flown"]).common() == "flow"
    assert Trie(["flat", "flow"]).common() == "fl"


def test_what_nobody_shares():
    assert Trie(["a", "b"]).common() == ""
    assert Trie().common() == ""
    assert Trie(["lone"]).common() == "lone"
