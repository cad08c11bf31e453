"""Distribution of the tests to processes."""

from hypothesis import given
from hypothesis import strategies as st

from forked_processes import Shares


@given(
    sizes=st.lists(st.integers(1, 6), max_size=6),
    pages=st.sets(st.integers(0, 5)),
    turns=st.lists(st.integers(0, 2), max_size=30),
)
def test_every_test_is_run_once_and_a_page_by_one_process(sizes, pages, turns):
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    files = [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    file_of = {index: number for number, indices in enumerate(files) for index in indices}
    shares, given_to = Shares(files, lambda index: file_of[index] not in pages), {}
    for process in [*turns, *([0, 1, 2] * (sum(sizes) + 1))]:
        index = shares.next(process)
        if index is not None:
            assert given_to.setdefault(index, process) == process
    assert sorted(given_to) == sorted(file_of)
    for page in pages & {*range(len(files))}:
        assert len({given_to[index] for index in files[page]}) == 1


def test_a_process_without_tests_gets_half_of_the_most_that_another_has_left():
    shares = Shares([range(9), range(9, 12)], lambda index: True)
    assert [shares.next(process) for process in "aabb"] == [0, 1, 9, 10]
    assert [shares.next("c") for _ in range(3)] == [6, 7, 8]
