"""Where the ranks of a pipeline wait, by what each does in which order."""

from __future__ import annotations

import pytest

from lakeckpt.core.pipeline_slots import Computation, pipeline_slots


def table(text: str) -> list[Computation]:
    """``0F1`` and the like, separated by spaces; one digit each."""
    return [Computation(stage=int(word[0]), kind=word[1], microbatch=int(word[2])) for word in text.split()]  # type: ignore[arg-type]


def slots(tables: dict[int, str], seconds: dict[str, float], **how: float) -> dict[int, list[tuple[str, str, float]]]:
    found = pipeline_slots({rank: table(text) for rank, text in tables.items()}, lambda one: seconds[one.kind], **how)
    return {rank: [(str(slot.after), str(slot.before), slot.length_s) for slot in of] for rank, of in found.items()}


GPIPE = {0: "0F0 0F1 0B0 0B1", 1: "1F0 1F1 1B0 1B1"}


def test_the_first_rank_waits_between_its_forwards_and_backwards_and_the_last_at_the_begin() -> None:
    assert slots(GPIPE, {"F": 1.0, "B": 2.0}) == {0: [("0F1", "0B0", 3.0)], 1: [("None", "1F0", 3.0)]}


def test_what_ranks_do_between_iterations_takes_nothing_from_their_waits() -> None:
    assert slots(GPIPE, {"F": 1.0, "B": 2.0}, between_s=5.0)[1] == [("None", "1F0", 3.0)]


def test_weights_fill_the_gaps_of_a_pipeline_without_bubbles() -> None:
    split = {0: "0F0 0F1 0I0 0W0 0I1 0W1", 1: "1F0 1F1 1I0 1I1 1W0 1W1"}
    seconds = {"F": 1.0, "I": 1.0, "W": 1.0}
    assert slots(split, seconds) == {0: [("0F1", "0I0", 2.0)], 1: [("None", "1F0", 2.0)]}


def test_a_rank_alone_never_waits() -> None:
    assert slots({0: "0F0 1F0 1B0 0B0"}, {"F": 1.0, "B": 1.0}) == {0: []}


def test_tables_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"never come.*0B0"):
        slots({0: "0B0 0F0"}, {"F": 1.0, "B": 1.0})
