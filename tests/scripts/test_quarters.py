"""Four quarters are all tests, and each has as many as the others, of every file too."""

from collections import Counter

from quarters import of_quarter

TESTS = [
    (file, number) for file, count in (("cuda", 32), ("ray", 5), ("soak", 3), ("kill", 1)) for number in range(count)
]


def test_every_test_is_in_one_quarter() -> None:
    quarters = [of_quarter(TESTS, number) for number in range(4)]
    assert sorted(one for quarter in quarters for one in quarter) == sorted(TESTS)
    assert {len(quarter) for quarter in quarters} == {10, 11}


def test_a_file_is_spread_over_all_quarters() -> None:
    for number in range(4):
        counts = Counter(file for file, _ in of_quarter(TESTS, number))
        assert counts["cuda"] == 8 and counts["ray"] in (1, 2) and counts["soak"] <= 1
