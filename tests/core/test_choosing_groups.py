"""Which groups make the next batch: oldest first, never beyond the cap where that can be helped, never for ever."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_core.staleness import Choice, OnStale, OpenGroup, choose_groups, groups_admissible


def ready(group: int, oldest_step: int) -> OpenGroup:
    return OpenGroup(group, is_ready=True, oldest_step=oldest_step, dispatched_step=oldest_step)


def running(group: int, oldest_step: int | None, dispatched_step: int = 0) -> OpenGroup:
    return OpenGroup(group, is_ready=False, oldest_step=oldest_step, dispatched_step=dispatched_step)


def choose(
    groups: list[OpenGroup], on_stale: OnStale, *, step: int = 10, cap: int = 4, size: int = 2, may_wait: bool = True
) -> Choice:
    return choose_groups(
        groups, step=step, groups_per_step=size, staleness_cap=cap, on_stale=on_stale, may_wait=may_wait
    )


class TestMask:
    def test_the_oldest_tokens_go_first_whatever_the_order_of_dispatch(self) -> None:
        groups = [ready(1, 9), ready(2, 7), ready(3, 8), ready(4, 7), running(0, 1)]
        assert choose(groups, "mask") == Choice(train=(2, 4))

    def test_half_a_batch_is_none(self) -> None:
        assert choose([ready(1, 9), running(0, 1)], "mask") == Choice()


class TestDrop:
    def test_what_is_too_old_is_dropped_finished_or_not(self) -> None:
        groups = [ready(1, 5), running(2, 5), ready(3, 6), ready(4, 9), ready(5, 9)]
        assert choose(groups, "drop") == Choice(train=(3, 4), drop=(1, 2))

    def test_a_group_that_waits_in_the_queue_has_no_tokens_that_could_be_too_old(self) -> None:
        assert choose([running(1, None, dispatched_step=0)], "drop") == Choice()


class TestWait:
    def test_a_group_at_its_last_step_is_waited_for(self) -> None:
        groups = [running(1, 6), ready(2, 9), ready(3, 9)]
        assert choose(groups, "wait") == Choice(wait_for=(1,))
        assert choose(groups, "wait", may_wait=False) == Choice(train=(2, 3))
        assert choose(groups, "wait", step=9) == Choice(train=(2, 3))

    def test_one_of_which_nothing_arrived_is_as_old_as_its_dispatch(self) -> None:
        assert choose([running(1, None, 6), ready(2, 9), ready(3, 9)], "wait") == Choice(wait_for=(1,))
        assert choose([running(1, None, 7), ready(2, 9), ready(3, 9)], "wait") == Choice(train=(2, 3))

    def test_deadlines_count_together(self) -> None:
        """Three that are due by the next step do not fit into it, so one of them must be in this batch."""
        groups = [running(1, 7), running(2, 7), running(3, 7), ready(4, 9), ready(5, 9)]
        assert choose(groups, "wait") == Choice(wait_for=(1, 2, 3))
        assert choose([*groups[1:], ready(1, 7)], "wait") == Choice(train=(1, 4))

    def test_what_is_lost_already_is_not_waited_for(self) -> None:
        assert choose([running(1, 5), ready(2, 9), ready(3, 9)], "wait") == Choice(train=(2, 3))

    def test_nobody_waits_where_it_would_not_change_the_batch(self) -> None:
        """More is due now than a batch holds (after a rollback): the unfinished one comes too late anyway."""
        groups = [ready(1, 6), ready(2, 6), running(3, 6)]
        assert choose(groups, "wait") == Choice(train=(1, 2))


@settings(max_examples=60)
@given(data=st.data())
def test_with_admission_waiting_keeps_everything_within_the_cap_and_always_ends(data: st.DataObject) -> None:
    """Episodes end in any order. Whoever is waited for ends at some time; then the steps go on."""
    max_staleness, size = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 3))
    cap = max_staleness + data.draw(st.integers(0, 2))
    birth: dict[int, int] = {}
    finished: set[int] = set()
    open_now: set[int] = set()
    dispatched = step = 0
    while step < 12:
        count = groups_admissible(
            max_staleness=max_staleness,
            groups_per_step=size,
            num_dispatched=dispatched,
            num_dropped=0,
            num_published=step * size,
        )
        new = range(dispatched, dispatched + count)
        open_now |= set(new)
        birth |= dict.fromkeys(new, step)
        dispatched += count
        groups = [OpenGroup(one, one in finished, birth[one], birth[one]) for one in sorted(open_now)]
        choice = choose_groups(groups, step=step, groups_per_step=size, staleness_cap=cap, on_stale="wait")
        assert not set(choice.wait_for) & finished
        if choice.train:
            assert all(step - birth[one] <= cap for one in choice.train)
            open_now -= set(choice.train)
            step += 1
        else:
            # Nothing else can happen than that something ends: it exists, so this is no deadlock.
            unfinished = sorted(open_now - finished)
            finished.add(data.draw(st.sampled_from(unfinished)))
