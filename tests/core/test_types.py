"""The nouns refuse what would break an invariant, and hold exactly what they were given."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from gspo_core.advantage import observations
from gspo_core.invariants import InvalidValue, NonFiniteValue
from gspo_core.types import (
    MAX_ASKED_CHARS,
    Asked,
    CacheMode,
    EpisodeKey,
    Group,
    Outcome,
    Repeated,
    Segment,
    Split,
    StopReason,
    TimeSplit,
    Trajectory,
    TurnReward,
)
from gspo_core.versions import StepReport, WeightFile, WeightsManifest
from tests.core.segments import JOB, episode, keys, segment


def test_types_are_importable_without_numpy() -> None:
    code = "import sys, gspo_core.types; sys.exit('numpy' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class TestEpisodeKey:
    @given(keys)
    def test_reads_back_what_it_prints(self, key: EpisodeKey) -> None:
        assert EpisodeKey.parse(str(key)) == key

    @pytest.mark.parametrize(
        "text", ["", "j", "j/1", "j/1/2/3", "/1/2", "j/-1/2", "j/1/x", "j/01/2", "j/1/+2", "j/1 /2", "j/٣/2", "j//2"]
    )
    def test_has_one_spelling(self, text: str) -> None:
        with pytest.raises(InvalidValue):
            EpisodeKey.parse(text)

    def test_parsing_a_hostile_number_takes_no_time(self) -> None:
        with pytest.raises(InvalidValue):
            EpisodeKey.parse("j/" + "9" * 1_000_000 + "/0")

    @pytest.mark.parametrize(
        "parts", [("", 0, 0), ("a/b", 0, 0), ("a\n", 0, 0), ("a\ud800", 0, 0), ("j", -1, 0), ("j", 0, -1)]
    )
    def test_refuses(self, parts: tuple[str, int, int]) -> None:
        with pytest.raises(InvalidValue):
            EpisodeKey(*parts)

    @pytest.mark.parametrize("number", [True, 1.0, np.int64(1), "1", 2**63])
    def test_counts_are_plain_ints(self, number: Any) -> None:
        with pytest.raises(InvalidValue):
            EpisodeKey("j", number, 0)

    def test_orders_by_job_group_member(self) -> None:
        assert sorted([EpisodeKey("a", 10, 0), EpisodeKey("a", 9, 5)])[0].group == 9


class TestOutcome:
    def test_a_failure_of_the_infrastructure_has_no_reward(self) -> None:
        assert Outcome(StopReason.ENV_ERROR).reward is None
        with pytest.raises(InvalidValue):
            Outcome(StopReason.ENV_ERROR, 0.0)

    @pytest.mark.parametrize("reason", [reason for reason in StopReason if reason.has_reward])
    def test_everything_else_has_one(self, reason: StopReason) -> None:
        assert Outcome(reason, 0.0).reward == 0.0
        with pytest.raises(InvalidValue):
            Outcome(reason)

    def test_numpy_numbers_become_plain_floats(self) -> None:
        outcome = Outcome(StopReason.COMPLETED, np.float32(0.5), {"a": np.int64(1)}, {"b": True})
        assert [type(outcome.reward), type(outcome.reward_parts["a"]), type(outcome.metrics["b"])] == [float] * 3

    def test_is_not_changed_by_the_mapping_that_it_was_built_from(self) -> None:
        parts = {"a": 1.0}
        outcome = Outcome(StopReason.COMPLETED, 1.0, parts)
        parts["a"] = 2.0
        assert outcome.reward_parts == {"a": 1.0}

    @pytest.mark.parametrize("number", [float("nan"), float("inf"), np.float32("-inf")])
    def test_refuses_what_is_not_finite(self, number: float) -> None:
        for arguments in ((number,), (0.0, {"a": number}), (0.0, {}, {"a": number})):
            with pytest.raises(NonFiniteValue):
                Outcome(StopReason.COMPLETED, *arguments)

    @pytest.mark.parametrize("arguments", [("x",), (0.0, {"a": "x"}), (0.0, {"a": None}), (0.0, {1: 0.0}), (10**400,)])
    def test_refuses_what_is_no_number(self, arguments: tuple[Any, ...]) -> None:
        with pytest.raises(InvalidValue):
            Outcome(StopReason.COMPLETED, *arguments)

    def test_refuses_an_unknown_stop_reason(self) -> None:
        with pytest.raises(InvalidValue, match="known: completed"):
            Outcome("bored", 0.0)  # type: ignore[arg-type]


class TestSegment:
    def test_holds_counts_that_check_it_end_to_end(self) -> None:
        one = segment()
        assert (one.num_tokens, one.num_actions, one.logprob_sum, one.is_final) == (4, 3, -1.75, True)

    def test_sums_in_float64(self) -> None:
        logprobs = np.full(8192, -0.1, np.float32)
        one = segment(token_ids=np.zeros(8192, int), action_mask=np.ones(8192, bool), behavior_logprobs=logprobs)
        assert one.logprob_sum == pytest.approx(8192 * float(np.float32(-0.1)), rel=1e-14)

    def test_arrays_are_of_their_type_and_cannot_be_written(self) -> None:
        one = segment()
        assert [one.token_ids.dtype, one.action_mask.dtype, one.behavior_logprobs.dtype] == ["int32", "bool", "float32"]
        for array in (one.token_ids, one.action_mask, one.behavior_logprobs):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 0

    def test_does_not_change_with_the_array_that_it_was_built_from(self) -> None:
        tokens = np.array([1, 2, 3, 4], np.int32)
        one = segment(token_ids=tokens)
        tokens[0] = 9
        assert one.token_ids.tolist() == [1, 2, 3, 4]

    def test_keeps_a_read_only_array_without_copying(self) -> None:
        tokens = np.array([1, 2, 3, 4], np.int32)
        tokens.flags.writeable = False
        assert segment(token_ids=tokens).token_ids is tokens

    def test_strided_arrays_become_contiguous(self) -> None:
        tokens = np.arange(8, dtype=np.int32)[::-2]
        tokens.flags.writeable = False
        one = segment(token_ids=tokens)
        assert one.token_ids.flags.c_contiguous
        assert one.token_ids.tolist() == [7, 5, 3, 1]

    @pytest.mark.parametrize(
        "changes",
        [
            {"token_ids": [1, 2, 3]},
            {"action_mask": [0, 1, 1]},
            {"behavior_logprobs": [0.0, -1.0, -1.0]},
            {"token_ids": [1, 2, 3, -1]},
            {"token_ids": [1, 2, 3, 2**31]},
            {"token_ids": [1.0, 2.0, 3.0, 4.0]},
            {"token_ids": [True, True, True, True]},
            {"token_ids": [[1, 2], [3, 4]]},
            {"token_ids": ["1", "2", "3", "4"]},
            {"action_mask": [0, 1, 2, 1]},
            {"action_mask": [0.0, 1.0, 0.5, 1.0]},
            {"action_mask": ["a", "b", "c", "d"]},
            {"behavior_logprobs": [0.0, -1.0, -1.0, 0.5]},
            {"behavior_logprobs": [-0.5, -1.0, -1.0, -1.0]},
            {"behavior_logprobs": [1e-6, -1.0, -1.0, -1.0]},
            {"behavior_logprobs": [None, -1.0, -1.0, -1.0]},
            {"token_ids": [], "action_mask": [], "behavior_logprobs": [], "outcome": None},
        ],
    )
    def test_refuses_arrays_that_break_an_invariant(self, changes: dict[str, Any]) -> None:
        with pytest.raises(InvalidValue):
            segment(**changes)

    # Signalling NaNs too: no bit pattern may turn into a warning instead of an error.
    @pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001])
    @pytest.mark.parametrize("place", [1, 2, 3])
    def test_refuses_log_probs_that_are_not_finite(self, bits: int, place: int) -> None:
        logprobs = np.array([0.0, -0.5, -0.25, -1.0], np.float32)
        logprobs.view(np.uint32)[place] = bits
        with pytest.raises(NonFiniteValue):
            segment(behavior_logprobs=logprobs)

    def test_refuses_plus_and_minus_infinity_together(self) -> None:
        with pytest.raises(NonFiniteValue):
            segment(behavior_logprobs=[0.0, float("inf"), float("-inf"), -1.0])

    def test_refuses_log_probs_beyond_float32(self) -> None:
        with pytest.raises(NonFiniteValue):
            segment(behavior_logprobs=[0.0, -1e300, -1.0, -1.0])

    def test_forgives_what_float32_rounds_up(self) -> None:
        assert segment(behavior_logprobs=[0.0, 1e-7, -1.0, -1.0]).logprob_sum == pytest.approx(-2.0, abs=1e-6)

    @pytest.mark.parametrize("name", ["attempt", "branch", "index", "turn", "version"])
    @pytest.mark.parametrize("value", [-1, 2**31, 1.0, True, np.int32(1), None])
    def test_refuses_counts_that_are_not_plain_ints(self, name: str, value: Any) -> None:
        with pytest.raises(InvalidValue, match=name):
            segment(**{name: value})

    @pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), "warm", None])
    def test_refuses_temperatures(self, value: Any) -> None:
        with pytest.raises(InvalidValue):
            segment(temperature=value)

    @pytest.mark.parametrize(
        "changes", [{"turn_reward": float("nan")}, {"turn_reward": "x"}, {"engine_id": None}, {"cache_mode": "warm"}]
    )
    def test_refuses_other_fields(self, changes: dict[str, Any]) -> None:
        with pytest.raises(InvalidValue):
            segment(**changes)

    def test_coerces_numbers_and_names(self) -> None:
        one = segment(temperature=np.float32(0.5), turn_reward=1, cache_mode="stale")
        assert (type(one.temperature), type(one.turn_reward), one.cache_mode) == (float, float, CacheMode.STALE)

    def test_an_outcome_may_come_alone(self) -> None:
        one = segment(token_ids=[], action_mask=[], behavior_logprobs=[])
        assert (one.num_tokens, one.num_actions, one.logprob_sum) == (0, 0, 0.0)

    @pytest.mark.parametrize(
        "changes",
        [
            {"token_ids": [11, 12, 13, 15]},
            {"behavior_logprobs": [0.0, -0.5, -0.25, -1.0000001]},
            {"version": 8},
            {"outcome": Outcome(StopReason.COMPLETED, 2.0)},
            {"outcome": None},
            {"turn_reward": 0.0},
            {"cache_mode": CacheMode.STALE},
            {"engine_id": "engine-1"},
            {"temperature": 0.5},
            {"branch": 1},
            {"spent": TimeSplit(1.0, 0.0, 0.0)},
            {"untrained_turns": (0,)},
            {"turn_rewards": ((0, 0.5),)},
            {"repeated": ((0, 1),)},
            {"asked": Asked(None, "", "messages", "policy", 1, 0)},
        ],
    )
    def test_differs_when_any_field_differs(self, changes: dict[str, Any]) -> None:
        assert segment() == segment()
        assert segment(**changes) != segment()

    def test_of_exact_checks_what_the_constructor_checks(self) -> None:
        fields = {name: value for name, value in vars(segment()).items() if name not in ("num_actions", "logprob_sum")}
        assert Segment.of_exact(dict(fields)) == segment()
        for name, value in [
            ("version", -1),
            ("turn", 2**31),
            ("temperature", 0.0),
            ("turn_reward", float("nan")),
            ("spent", TimeSplit(0.0, -1.0, 0.0)),
            ("spent", TimeSplit(0.0, 0.0, float("nan"))),
            ("untrained_turns", (1, 1)),
            ("untrained_turns", (2, 1)),
            ("untrained_turns", (-1,)),
            ("turn_rewards", (TurnReward(1, 0.5), TurnReward(1, 0.5))),
            ("turn_rewards", (TurnReward(2, 0.5), TurnReward(1, 0.5))),
            ("turn_rewards", (TurnReward(0, float("nan")),)),
            ("repeated", (Repeated(1, 1), Repeated(1, 1))),
            ("repeated", (Repeated(1, 0),)),
            ("asked", Asked(0, "", "messages", "policy", 1, 0)),
            ("asked", Asked(None, "", "messages", "policy", 1, 2)),
            ("asked", Asked(None, "", "messages", "x" * (MAX_ASKED_CHARS + 1), 1, 0)),
        ]:
            with pytest.raises(InvalidValue):
                Segment.of_exact(fields | {name: value})
        with pytest.raises(InvalidValue):
            Segment.of_exact(fields | {"token_ids": -fields["token_ids"]})

    def test_only_the_last_segment_names_untrained_turns(self) -> None:
        with pytest.raises(InvalidValue, match="only the last"):
            segment(outcome=None, untrained_turns=(0,))
        with pytest.raises(InvalidValue, match="only the last"):
            segment(outcome=None, turn_rewards=((0, 1.0),))
        with pytest.raises(InvalidValue, match="only the last"):
            segment(outcome=None, repeated=((0, 1),))


class TestTrajectory:
    def test_untrained_turns_are_read_and_no_actions(self) -> None:
        key = EpisodeKey(JOB, 3, 0)
        one = {"key": key, "attempt": 0, "outcome": None}
        end = {"token_ids": [], "action_mask": [], "behavior_logprobs": []}
        end |= {"key": key, "attempt": 0, "untrained_turns": (1, 2)}
        trajectory = Trajectory(
            (
                segment(**one, index=0, branch=0, turn=0),
                segment(**one, index=1, branch=1, turn=1),
                segment(**one, index=2, branch=0, turn=2),
                segment(**end, index=3, branch=0, turn=2),
            )
        )
        (branch,) = trajectory.branches
        assert branch.token_ids.tolist() == [*segment().token_ids.tolist()] * 2
        assert branch.action_mask.tolist() == [*segment().action_mask.tolist(), *[False] * 4]
        assert branch.behavior_logprobs.tolist() == [*segment().behavior_logprobs.tolist(), *[0.0] * 4]
        assert (branch.num_actions, trajectory.num_trained, trajectory.num_actions) == (3, 3, 9)

    def test_the_rewards_of_a_turn_add_up(self) -> None:
        """Those that a segment brought and those known at the end; there is none of what was never sampled."""
        key = EpisodeKey(JOB, 3, 0)
        one = {"key": key, "attempt": 0, "outcome": None}
        nothing = {"token_ids": [], "action_mask": [], "behavior_logprobs": []}
        trajectory = Trajectory(
            (
                segment(**one, index=0, turn=0, turn_reward=0.25),
                segment(**one, index=1, turn=1),
                segment(**one, index=2, turn=2),
                segment(**nothing, key=key, attempt=0, index=3, turn=2, turn_rewards=((0, 0.5), (2, -1.0), (9, 1.0))),
            )
        )
        assert trajectory.turn_rewards == [0.75, None, -1.0]

    def test_an_episode_that_read_nothing_has_no_turn(self) -> None:
        nothing = {"token_ids": [], "action_mask": [], "behavior_logprobs": [], "turn_rewards": ((0, 0.5),)}
        trajectory = Trajectory((segment(**nothing, key=EpisodeKey(JOB, 3, 0), attempt=0, index=0, turn=0),))
        assert (trajectory.num_turns, trajectory.turn_rewards, observations(trajectory)) == (0, [], [])

    def test_stitches_its_segments_place_by_place(self) -> None:
        """A distinct value at each place, so that any shift of one array against another shows."""
        segments = episode(EpisodeKey(JOB, 3, 0), cuts=[5, 6, 10])
        (branch,) = Trajectory(segments).branches
        places = np.arange(12)
        acted = places % 3 != 0
        assert branch.token_ids.tolist() == (1000 + places).tolist()
        assert branch.action_mask.tolist() == acted.tolist()
        assert branch.behavior_logprobs.tolist() == np.where(acted, -(places + 1) / 64, 0).tolist()
        assert branch.versions.tolist() == [0] * 5 + [1] + [2] * 4 + [3] * 2
        assert branch.turn_ids.tolist() == [0] * 5 + [1] + [2] * 4 + [3] * 2
        assert (branch.num_tokens, branch.num_actions) == (12, 8)

    def test_branches_are_kept_apart_and_those_without_actions_are_left_out(self) -> None:
        key = EpisodeKey(JOB, 3, 0)
        silent = {"token_ids": [1], "action_mask": [False], "behavior_logprobs": [0.0]}
        trajectory = Trajectory(
            (
                segment(key=key, index=0, branch=0, outcome=None, token_ids=[1, 2, 3, 4]),
                segment(key=key, index=1, branch=1, outcome=None, token_ids=[5, 6, 7, 8]),
                segment(key=key, index=2, branch=0, outcome=None, token_ids=[9, 10, 11, 12]),
                segment(key=key, index=3, branch=2, **silent),
            )
        )
        assert [branch.token_ids.tolist() for branch in trajectory.branches] == [
            [1, 2, 3, 4, 9, 10, 11, 12],
            [5, 6, 7, 8],
        ]
        assert trajectory.num_actions == 9

    def test_versions_are_those_that_sampled(self) -> None:
        key = EpisodeKey(JOB, 3, 0)
        prompt = segment(key=key, version=4, token_ids=[1], action_mask=[False], behavior_logprobs=[0.0], outcome=None)
        assert Trajectory((prompt, segment(key=key, index=1, version=6))).versions == {6}

    @pytest.mark.parametrize(
        "changes",
        [
            [{"index": 0}, {"index": 2, "final": True}],
            [{"index": 1}, {"index": 0, "final": True}],
            [{"index": 0}, {"index": 1}],
            [{"index": 0, "final": True}, {"index": 1, "final": True}],
            [{"index": 0}, {"index": 1, "attempt": 1, "final": True}],
            [{"index": 0}, {"index": 1, "key": EpisodeKey(JOB, 3, 2), "final": True}],
            [],
        ],
    )
    def test_refuses_segments_that_are_no_episode(self, changes: list[dict[str, Any]]) -> None:
        segments = []
        for change in changes:
            final = change.pop("final", False)
            segments.append(segment(**change, **({} if final else {"outcome": None})))
        with pytest.raises(InvalidValue):
            Trajectory(tuple(segments))


class TestGroup:
    def test_members_may_be_missing(self) -> None:
        trajectory = Trajectory(episode(EpisodeKey(JOB, 3, 1), cuts=[4], reward=0.25))
        group = Group(JOB, 3, Split.TRAIN, 5, 4, (trajectory,))
        assert (group.rewards, list(group)) == ((0.25,), [trajectory])

    @pytest.mark.parametrize("members", [(1, 0), (0, 0), (0, 2)])
    def test_refuses_members_out_of_order_or_range(self, members: tuple[int, ...]) -> None:
        trajectories = tuple(Trajectory(episode(EpisodeKey(JOB, 3, member), cuts=[])) for member in members)
        with pytest.raises(InvalidValue):
            Group(JOB, 3, Split.TRAIN, 5, 2, trajectories)

    def test_refuses_strangers(self) -> None:
        stranger = Trajectory(episode(EpisodeKey(JOB, 4, 0), cuts=[]))
        with pytest.raises(InvalidValue):
            Group(JOB, 3, Split.TRAIN, 5, 2, (stranger,))


class TestManifestAndReport:
    def test_label_names_job_epoch_and_version(self) -> None:
        manifest = WeightsManifest(JOB, version=5, epoch=2, step=4, files=(WeightFile("a/b", 1, "0" * 64),))
        assert manifest.label == "job-1/2/5"

    @pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a/"])
    def test_a_weight_file_stays_inside_its_version(self, path: str) -> None:
        with pytest.raises(InvalidValue):
            WeightFile(path, 1, "0" * 64)

    @pytest.mark.parametrize(("size", "digest"), [(-1, "0" * 64), (1, "0" * 63), (1, "G" * 64), (1, "0" * 64 + "\n")])
    def test_a_weight_file_has_a_size_and_a_digest(self, size: int, digest: str) -> None:
        with pytest.raises(InvalidValue):
            WeightFile("a", size, digest)

    def test_a_manifest_has_files_and_counts_from_zero(self) -> None:
        with pytest.raises(InvalidValue):
            WeightsManifest(JOB, 0, 0, 0, ())
        with pytest.raises(InvalidValue):
            WeightsManifest(JOB, -1, 0, 0, (WeightFile("a", 1, "0" * 64),))

    def test_a_report_holds_finite_numbers_only(self) -> None:
        with pytest.raises(NonFiniteValue):
            StepReport(step=1, version=1, epoch=0, metrics={"reward/mean": float("nan")})
