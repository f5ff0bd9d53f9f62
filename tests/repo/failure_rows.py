"""The rows of docs/failures.md about what happens while episodes are played; ``SECTIONS`` has all of the page."""

from __future__ import annotations

from tests.repo.failure_row import AGAIN, GOES_ON, LATER, MEMBER, NO, NOTHING, WITHOUT, YES, Row
from tests.repo.failure_rows_of_service import DISK, REDIS, TRAINER, USER

ENVIRONMENT = (
    Row(
        "An episode ends as it should: the model answers, or the world says that it is over",
        ("stop:completed", "stop:env_done", "stop:tool_stopped"),
        "`completed`, `env_done`; `tool_stopped` only where your own rollout code says so",
        MEMBER,
        NOTHING,
        "yes, with the reward of the environment",
        ("test_rollout_episode.py::test_an_episode_is_recorded_token_for_token",),
    ),
    Row(
        "It reaches a limit of the job, or says the same again and again",
        (
            *("stop:max_turns", "stop:max_tokens", "stop:max_tool_calls", "stop:context_overflow"),
            *("stop:episode_timeout", "stop:repetition"),
        ),
        "`max_turns`, `max_tokens`, `max_tool_calls`, `context_overflow`, `episode_timeout`, `repetition`",
        MEMBER,
        NOTHING,
        "yes, as judged, or with 0 (`on_truncation: zero`)",
        (
            "test_rollout_episode.py::test_every_limit_has_its_stop_reason_and_is_still_scored",
            "test_rollout_episode.py::test_a_truncated_episode_gets_zero_where_the_job_says_so",
        ),
    ),
    Row(
        "The model writes calls that cannot be read, more often than `limits.on_parse_error` allows",
        ("stop:parse_error",),
        "`parse_error`; each mistake before that is answered",
        MEMBER,
        NOTHING,
        "yes, as judged",
        ("test_rollout_episode.py::test_an_unreadable_call_is_answered_and_readable_ones_start_the_count_again",),
    ),
    Row(
        "A tool raises",
        (),
        "the model reads `error: Type: text` and goes on",
        MEMBER,
        NOTHING,
        "yes, as judged",
        ("test_rollout_episode.py::test_a_tool_that_raises_is_something_to_read",),
    ),
    Row(
        "The model's own call hangs, crashes its process or fills its memory",
        ("stop:tool_timeout", "stop:env_crash", "host:hung", "host:crashed", "host:over_memory"),
        "`tool_timeout` (its process `hung`), `env_crash` (`crashed`, `over_memory`); neighbours are moved and not "
        "charged",
        MEMBER,
        NOTHING,
        "yes, with the lowest reward: breaking the world is no way out",
        (
            "test_rollout_host.py::test_what_the_policy_breaks_is_its_own_outcome",
            "test_host.py::test_of_several_suspects_only_the_one_that_crashes_alone_is_blamed",
            "test_dodger.py::test_a_policy_that_can_dodge_by_crashing_learns_not_to",
        ),
    ),
    Row(
        "The environment itself fails, or the agent that plays in its place (`agent`): it cannot begin (`task`, "
        "`start`, `reset`, `prompt`), answer (`act`, `done`), "
        "keep its state (`snapshot`, `restore`) or judge (`score`: an error, NaN, no number; `judge`: the model that a "
        "job asks for the reward stays away, refuses, or says no score however often it is asked)",
        (
            *("phase:task", "phase:start", "phase:reset", "phase:prompt", "phase:act", "phase:done"),
            *("phase:agent", "phase:snapshot", "phase:restore", "phase:score", "phase:judge", "stop:env_error"),
        ),
        AGAIN,
        WITHOUT,
        "goes on; `env.health` events and `attempts/..._failed` count it",
        "no: a failure of the world is never a reward of 0",
        (
            "test_rollout_episode.py::test_a_failing_world_costs_an_attempt_and_then_the_reward_but_nothing_else",
            "test_rollout_host.py::test_a_failing_scorer_is_never_a_reward_of_zero",
            "test_host.py::test_what_the_policy_did_not_cause_is_a_failure_without_reward",
            "test_gateway_judge.py::test_a_judge_that_fails_is_counted_and_never_a_reward_of_0",
        ),
    ),
    Row(
        "An agent ends without a reward, and the job waits for one (`rewards.deadline_s`): its reward does not come",
        ("stop:no_reward",),
        "`no_reward` at the deadline; a reward after it is refused with 409. What single turns were paid meanwhile is "
        "its reward where there is no other",
        WITHOUT,
        "goes on; `rewards/missed` and `stop/no_reward` count it, `rewards/waiting_groups` what still waits",
        "no: never as a reward of 0",
        (
            "test_gateway_late.py::test_a_reward_that_never_comes_is_no_reward_of_0",
            "test_trainer_late_rewards.py::test_a_reward_that_never_comes_costs_its_member_alone",
            "test_bus_rewards.py::test_a_reward_that_never_comes_ends_the_wait_at_the_deadline",
        ),
    ),
    Row(
        "Rewards come when tokens of their group are beyond `staleness_cap`",
        ("group:dropped_late",),
        NOTHING,
        "by default those tokens leave the loss and the rewards stay in the baseline; with `on_late_reward: drop` "
        "`dropped_late`, and another one is started",
        "goes on; an alert `stale_backlog` tells of eight batches' worth dropped in a row",
        "what is within the cap; with `on_late_reward: train` all of it",
        (
            "test_trainer_late_rewards.py::test_what_is_too_old_is_trained_masked_or_dropped",
            "test_trainer_late_rewards.py::test_steps_go_on_and_late_tokens_are_trained_with_their_true_age",
        ),
    ),
    Row(
        "It fails for everybody: 16 attempts in a row, or 4 that took 10 s each",
        ("code:env_unhealthy",),
        "waits, and loses no attempt; one tries again after 1 s, 2 s, up to 30 s",
        "waits",
        "`running`, `env_unhealthy` with the last error, until one attempt succeeds",
        LATER,
        (
            "test_rollout_worker.py::test_an_environment_that_only_fails_is_quarantined_said_to_be_ill_and_recovers",
            "test_trainer_hindrances.py::test_a_job_says_that_its_environment_is_ill_until_it_is_well_again",
        ),
    ),
    Row(
        "It never worked: it fails whatever begins, and no step was trained, for as long as its start may take (at "
        "least 30 s; five times that while some worker does not complain)",
        ("code:environment_failed",),
        "ends with the job",
        "`dropped_job_over`",
        "`failed`, `environment_failed`, with its last error; its trainer is free",
        NO,
        (
            "test_trainer_hindrances.py::test_an_environment_that_never_worked_ends_the_job_with_its_error",
            "test_trainer_standstill.py::test_a_job_whose_environment_never_works_frees_its_trainer",
            "test_trainer_hindrances.py::test_one_that_ever_worked_is_waited_for",
        ),
    ),
    Row(
        "It shows images, which no model here reads",
        ("phase:images", "code:images_unsupported"),
        f"`images` failed: {AGAIN}",
        WITHOUT,
        "`failed`, `images_unsupported`, with the first image, however much went well before: only what is shown none "
        "would be trained",
        NO,
        (
            "test_rollout_episode.py::test_images_are_told_with_the_first_episode",
            "test_trainer_hindrances.py::test_images_end_the_job_with_the_first_episode",
        ),
    ),
    Row(
        "The model's directory is missing, has no configuration, or holds a model that cannot be trained",
        ("code:model_invalid",),
        "is not begun",
        "is not begun",
        "refused when it is submitted, where a process of the service sees the files; while it waits, `queued` with "
        "`model_invalid`; `failed` when a trainer takes it so",
        NO,
        (
            "test_api_models.py::test_a_model_that_no_worker_sees_is_refused_at_once",
            "test_trainer_worker.py::test_a_queued_job_says_that_its_model_is_missing_until_it_comes",
        ),
    ),
    Row(
        "No rollout worker can load an environment, or the model's directory (such as a name of the hub that was never "
        "fetched), config or chat template (`JobNotServable`)",
        ("error:JobNotServable", "code:env_unhealthy"),
        "is not begun",
        "is not begun",
        "`starting`, `env_unhealthy` with the complaint; 30 s after the first one `failed`",
        NO,
        (
            "test_trainer_environments.py::test_an_environment_that_nobody_can_load_ends_the_job_with_the_cause",
            "test_rollout_loading.py::test_what_cannot_be_loaded_says_why",
        ),
    ),
    Row(
        "The process that runs the environment cannot start, or what it needs elsewhere (`GSPO_ENV_HOSTS`, the server "
        "of an adapter) stays away",
        ("phase:boot", "phase:connection"),
        f"`boot` (or `connection`) failed: {AGAIN}",
        WITHOUT,
        "as for a world that fails",
        NO,
        (
            "test_host.py::test_a_host_that_ends_just_when_it_is_asked_for_a_process_is_started_again",
            "test_host_service.py::test_a_service_that_is_away_is_waited_for_but_not_for_ever",
        ),
    ),
    Row(
        "That process is killed from outside, or closed",
        ("host:killed", "host:closed", "phase:host"),
        "(`host` lost: `killed`, `closed`) goes on from its snapshot or by replay, else begins again; eight times "
        "uncharged. The same action killed twice is that action's fault: `env_crash`",
        "waits",
        NOTHING,
        LATER,
        (
            "test_rollout_host.py::test_a_host_that_is_killed_costs_no_attempt",
            "test_host.py::test_killed_once_is_chance_killed_by_the_same_action_twice_is_not",
        ),
    ),
    Row(
        "A world that calls itself `replayable` answers differently the second time",
        ("phase:replay", "error:LedgerConflict"),
        "`replay` failed, or `LedgerConflict`: begins again, nothing of the old attempt is kept",
        "waits",
        NOTHING,
        "only the new attempt",
        (
            "test_rollout_episode.py::test_a_world_that_answers_differently_in_a_replay_starts_again",
            "test_host.py::test_a_world_that_only_claims_to_be_replayable_is_found_out",
        ),
    ),
    Row(
        "The state that a world wants kept is larger than 1 MiB",
        ("error:WorldSnapshotNotKept",),
        "goes on (`WorldSnapshotNotKept`, counted as `worlds/not_kept`); if its worker dies it begins at an older "
        "state",
        MEMBER,
        NOTHING,
        YES,
        ("test_rollout_partial.py::test_a_world_too_large_to_keep_is_counted_and_its_episode_goes_on",),
    ),
)

GROUPS = (
    Row(
        "The members that the group needs have a reward: one, or `k` with `on_partial_group: min_viable:k`, or all "
        "with "
        "`drop`",
        ("group:trained", "group:evaluated"),
        "as above",
        "`trained`, or `evaluated` where it was held out",
        "one step further",
        YES,
        ("test_trainer_sequences.py::test_an_episode_without_a_reward_is_left_out_of_batch_and_baseline",),
    ),
    Row(
        "Too few members have one",
        ("group:dropped_partial", "code:env_unhealthy"),
        "those that ended well are thrown away with it",
        "`dropped_partial`, and another one is started",
        "eight batches' worth of dropped groups in a row: `failed`, `env_unhealthy`",
        NO,
        ("test_trainer_selection.py::test_what_is_never_trained",),
    ),
    Row(
        "Nothing was sampled in any member: the prompt leaves no room in the context, or they ended before their first "
        "token",
        (
            "group:dropped_no_tokens",
            *("code:prompt_too_long", "code:no_tokens_sampled"),
            *("alert:prompt_too_long", "alert:no_tokens_sampled"),
        ),
        "`context_overflow`, or as it ended",
        "`dropped_no_tokens`, and another one is started",
        "the alert `prompt_too_long` (with both numbers) or `no_tokens_sampled`; `failed` with the same code if it is "
        "so of all first groups, or of eight batches' worth in a row",
        NO,
        (
            "test_trainer_standstill.py::test_a_job_whose_prompts_do_not_fit_says_both_numbers",
            "test_trainer_selection.py::test_a_prompt_that_does_not_fit_is_a_sentence_with_both_numbers",
            "test_trainer_selection.py::test_a_group_without_a_sampled_token_says_how_its_episodes_ended",
        ),
    ),
    Row(
        "All members have the same reward, and the job says `zero_variance: drop`",
        ("group:dropped_zero_variance", "code:all_rewards_equal"),
        NOTHING,
        "`dropped_zero_variance`, and another one is started",
        "eight batches' worth in a row: `failed`, `all_rewards_equal`",
        "no; by default it is trained, with an advantage of 0",
        ("test_trainer_selection.py::test_what_is_never_trained",),
    ),
    Row(
        "Tokens are older than `staleness_cap` when their turn comes",
        ("group:dropped_stale", "code:stale_backlog", "alert:stale_backlog", "stop:stale"),
        "by default (`on_stale: mask`) those tokens leave the loss and the reward stays; `stale` only where your own "
        "rollout code says so",
        "`on_stale: drop`: `dropped_stale`, and another one is started",
        "goes on; replacements wait, and the job says so, until an engine holds the newest weights; an alert "
        "`stale_backlog` tells of eight batches' worth dropped in a row (0.2.0 and before: `failed`)",
        "what is within the cap",
        (
            "test_trainer_selection.py::test_it_waits_for_the_episode_at_its_last_step_and_says_which",
            "test_trainer_selection.py::test_waiting_has_a_limit",
            "test_trainer_too_old.py::test_age_alone_never_ends_a_job_and_a_long_row_of_it_is_told_once",
            "test_trainer_too_old.py::test_replacements_wait_while_no_engine_has_followed_and_the_job_says_which",
        ),
    ),
    Row(
        "A batch waits for its stragglers alone, and the job says `on_stragglers: cancel`",
        ("stop:cancelled",),
        "is cut off, without an outcome; `cancelled` only where your own rollout code says so",
        "is trained without them",
        NOTHING,
        "the others",
        ("test_trainer_stragglers.py::test_a_straggler_is_cut_off_when_the_batch_waits_for_it_alone",),
    ),
    Row(
        "A user, or an episode, is erased before it is trained",
        ("group:dropped_erased", "error:Erased"),
        "ends without an outcome, its segments are gone; whoever plays it is told at its next write (`Erased`), its "
        "agent with 409",
        "goes on without it, or `dropped_erased`, and another one is started",
        "goes on, whatever number of groups is dropped for it",
        "the others",
        (
            "test_bus_erasing.py::test_nothing_that_was_said_is_left_at_any_stage",
            "test_bus_erasing.py::test_an_episode_ends_while_it_is_erased",
            "test_trainer_erasing.py::test_what_is_erased_after_its_group_was_chosen_is_in_no_log",
            "test_trainer_erasing.py::test_groups_that_were_erased_are_replaced_and_count_against_nobody",
            "test_gateway_erasing.py::test_an_agent_that_talks_on_is_told_and_nothing_is_written",
        ),
    ),
)

ENGINE = (
    Row(
        "An engine does not answer, is busy, or dies (`EngineUnavailable`)",
        ("error:EngineUnavailable",),
        "asks another engine, or the same one later; what is stored stays, and the clock of the episode stands still",
        "waits",
        "goes on with the others; the engine is taken again when it is back",
        LATER,
        (
            "test_rollout_engines.py::test_a_request_goes_on_elsewhere_when_its_engine_dies",
            "test_rollout_worker.py::test_an_engine_that_goes_away_is_waited_for",
            "test_engines.py::test_an_engine_dies_and_another_joins_while_the_job_goes_on",
        ),
    ),
    Row(
        "An engine asks for another key than ours (`EngineKeyRefused`)",
        ("error:EngineKeyRefused",),
        "asks another engine",
        "does not bind it, or gives it back",
        "`starting`, `no_engine_for_model` with the entry of `GSPO_ENGINE_KEYS` that is missing or wrong",
        LATER,
        (
            "test_engine_keys.py::test_a_missing_and_a_wrong_key_say_what_to_do",
            "test_engine_keys.py::test_use_and_control_are_apart",
        ),
    ),
    Row(
        "No engine that fits the model is there, or free; or its address names an unknown kind (`NoSuchKind`)",
        ("code:no_engine_for_model", "error:NoSuchKind"),
        "waits",
        "waits",
        "`starting`, `no_engine_for_model` with what is missing at each engine",
        LATER,
        (
            "test_trainer_engines.py::test_an_engine_that_ignores_what_it_is_told_is_not_taken_and_the_job_says_why",
            "test_trainer_engines.py::test_an_engine_of_another_shape_is_never_told_to_load",
        ),
    ),
    Row(
        "The engines of its model serve another job",
        ("code:no_engine_for_model",),
        "is not begun",
        "is not begun",
        "`starting`, `no_engine_for_model` with the job that has each of them; it gets one when that job needs fewer, "
        "or is over",
        LATER,
        ("test_trainer_engines.py::test_a_job_that_waits_for_an_engine_says_which_job_has_it",),
    ),
    Row(
        "All engines of a running job are gone",
        ("code:no_engine_for_model",),
        "waits; its clock stands still",
        "waits",
        "`running`, `no_engine_for_model`: since when, and what became of those that served it; until one is back",
        LATER,
        (
            "test_trainer_engines.py::test_a_job_that_lost_all_its_engines_says_which_they_were_until_one_is_back",
            "test_trainer_hindrances.py::test_a_job_without_any_engine_says_which_were_there_and_since_when",
        ),
    ),
    Row(
        "An engine refuses a request (`EngineRejected`)",
        ("error:EngineRejected", "phase:engine"),
        f"asks another one; if all refuse, an attempt has failed (`engine`): {AGAIN}",
        WITHOUT,
        NOTHING,
        NO,
        (
            "test_rollout_engines.py::test_what_one_engine_refuses_another_may_take",
            "test_rollout_episode.py::test_a_question_that_every_engine_refuses_is_said_to_be_that",
        ),
    ),
    Row(
        "An engine's answer breaks the protocol (`EngineProtocolError`, `NotHttp`), or carries the label of other "
        "weights "
        "(`InvalidAnswer`)",
        ("error:EngineProtocolError", "error:InvalidAnswer", "error:NotHttp"),
        "the whole answer is thrown away and asked for again",
        "waits",
        NOTHING,
        "only the new answer",
        (
            "test_rollout_engines.py::test_tokens_with_another_jobs_label_or_broken_answers_are_thrown_away",
            "test_engine_client.py::test_an_answer_that_breaks_a_rule_is_refused_whole",
        ),
    ),
    Row(
        "An engine may hold any weights: a load was cut off, missed its deadline, or the engine was restarted "
        "(`EngineDirty`)",
        ("error:EngineDirty",),
        "asks it nothing until a full load was verified",
        "waits",
        "goes on with the others",
        LATER,
        (
            "test_trainer_engines.py::test_a_load_that_fails_half_way_makes_an_engine_dirty_until_a_full_load",
            "test_trainer_engines.py::test_an_engine_that_was_restarted_is_given_its_weights_again",
        ),
    ),
    Row(
        "An engine computes with other weights than it says, once",
        ("group:dropped_mismatch", "code:engine_mismatch"),
        "what it sampled under that version is thrown away",
        "`dropped_mismatch`, and another one is started",
        "the engine is loaded again and checked again; eight batches' worth of such groups in a row: `failed`, "
        "`engine_mismatch`",
        NO,
        (
            "test_trainer_parity.py"
            "::test_an_engine_that_was_wrong_once_is_mended_and_what_it_sampled_meanwhile_is_dropped",
        ),
    ),
    Row(
        "It does so again, or recorded log-probs are not the trainer's (template, temperature, precision)",
        ("code:engine_mismatch",),
        "ends with the job",
        "`dropped_job_over`",
        "`failed`, `engine_mismatch`, with the number and the bound",
        "nothing beyond the bound",
        (
            "test_trainer_parity.py::test_recorded_logprobs_that_differ_end_the_job_before_its_first_step",
            "test_engines.py::test_an_engine_with_other_weights_under_the_right_label_ends_the_job_with_the_reason",
        ),
    ),
)

WORKER = (
    Row(
        "No rollout worker, or no trainer, has come yet",
        ("code:waiting_for_workers", "code:waiting_for_trajectories"),
        "waits",
        "waits",
        "`queued` or `starting`, `waiting_for_workers`, or `no_trainer` where none is alive; once it runs "
        "`waiting_for_trajectories` is all that it says",
        LATER,
        ("test_trainer_environments.py::test_without_a_complaint_a_job_waits_for_workers_as_long_as_it_takes",),
    ),
    Row(
        "All rollout workers of a running job are gone",
        ("code:no_rollout_worker",),
        "waits for a worker",
        "waits",
        "`running`, `no_rollout_worker`: since when, and which there were; until one is back",
        LATER,
        ("test_trainer_hindrances.py::test_a_job_without_any_worker_says_who_was_there",),
    ),
    Row(
        "A rollout worker dies, or is silent for `GSPO_LEASE_S`",
        (),
        "another worker goes on from the stored tokens, if the world can be gone on with; else it begins again",
        "waits",
        NOTHING,
        LATER,
        (
            "test_rollout_worker.py::test_another_worker_finishes_what_a_killed_one_had_begun_and_nothing_is_doubled",
            "test_rollout_kills.py::test_killed_workers_cost_little_and_repeat_nothing",
        ),
    ),
    Row(
        "A gateway dies",
        (),
        "the one that starts in its place goes on at once from the stored tokens, where the kernel tells the place "
        "(Linux) or the container keeps its name; else, and with agents that cannot be gone on with, as a worker's",
        "waits",
        NOTHING,
        LATER,
        (
            "test_gateway_killed.py::test_a_client_that_repeats_a_request_twice_comes_to_its_end",
            "test_bus_places.py::test_the_successor_has_the_episodes_at_once_and_the_old_token_none",
            "test_bus_places.py::test_who_lost_the_place_while_it_lived_goes_on_without_it",
        ),
    ),
    Row(
        "A worker is asked to leave (`Drained`), or others wait for a place (`Interrupted`)",
        ("error:Drained", "error:Interrupted"),
        f"is handed back and {GOES_ON}",
        "waits",
        NOTHING,
        LATER,
        (
            "test_rollout_worker.py::test_a_worker_that_leaves_costs_no_token_and_another_goes_on",
            "test_rollout_partial.py::test_an_episode_gives_way_when_it_has_had_its_share_and_others_wait",
        ),
    ),
    Row(
        "A worker was taken for dead and wakes up (`Fenced`)",
        ("error:Fenced",),
        "its late writes are refused; the other worker's episode counts",
        MEMBER,
        NOTHING,
        "once",
        (
            "test_bus_zombies.py::test_the_late_writes_of_a_worker_that_was_stopped_are_fenced",
            "test_rollout_worker.py::test_a_worker_that_lost_its_lease_drops_its_episodes_and_joins_again",
        ),
    ),
    Row(
        "An episode kills its workers: three deaths in a row without progress, then three alone",
        (),
        "is given up (a dead letter with the reason), and takes no other with it",
        WITHOUT,
        NOTHING,
        NO,
        ("test_bus_deaths.py::test_an_episode_that_kills_its_workers_takes_no_other_with_it",),
    ),
    Row(
        "An episode meets a defect of this program (`unexpected`), or its record says otherwise (`Conflict`)",
        ("phase:unexpected", "error:Conflict"),
        "begins again as for a world that fails; where even that fails, it is given up after three leases",
        WITHOUT,
        "goes on; the log has the traceback",
        NO,
        (
            "test_rollout_episode.py::test_a_defect_in_a_world_is_contained",
            "test_rollout_worker.py::test_an_episode_that_meets_a_defect_of_ours_is_given_up_with_the_cause",
        ),
    ),
)

SECTIONS: tuple[tuple[str, tuple[Row, ...]], ...] = (
    ("The environment, and what the model does to it", ENVIRONMENT),
    ("Groups", GROUPS),
    ("Engines", ENGINE),
    ("Rollout workers", WORKER),
    ("Trainers", TRAINER),
    ("Redis", REDIS),
    ("The disk, and other releases", DISK),
    ("What you do, and how it ends", USER),
)
