"""The rows of docs/failures.md about what serves a job: trainers, Redis, the disk, and what a user does.

Rule: as in ``failure_rows``, which has the row itself and what happens while episodes are played.
"""

from __future__ import annotations

from tests.repo.failure_row import LATER, NO, NOTHING, Row

TRAINER = (
    Row(
        "A trainer dies, or is silent for `GSPO_LEASE_S`",
        ("code:trainer_lost",),
        "is played on meanwhile",
        "waits",
        "the attempt ends with `trainer_lost`, which counts; another one goes on from checkpoint and batch logs",
        "each group once",
        (
            ""
            "test_trainer_loop.py::test_a_loop_that_is_killed_at_random_points_ends_bit_for_bit_where_an_undisturbed_one_does",
            "test_store_claims.py::test_the_job_of_a_silent_trainer_starts_again_elsewhere",
        ),
    ),
    Row(
        "The last trainer is gone: killed, or asked to leave, and none comes",
        ("code:no_trainer",),
        "is played on, as far as it may without new weights",
        "waits",
        "says so within two leases (the API looks): `no_trainer`, who had it last, until when, why it left, and the "
        "step that it goes on from; `gspo cancel` ends it at once",
        LATER,
        (
            "test_unattended.py::test_a_job_whose_only_trainer_was_killed_says_so_within_two_leases",
            "test_unattended.py::test_a_job_that_was_handed_over_to_nobody_says_so",
            "test_unattended.py::test_a_job_without_a_trainer_is_cancelled_at_once",
        ),
    ),
    Row(
        "The process of an attempt is killed (out of memory), crashes, or does not answer for a minute",
        ("code:process_lost",),
        "is played on meanwhile",
        "waits",
        "`process_lost` with its last words, which counts; the trainer stays",
        "each group once",
        (
            "test_trainer_attempts.py::test_an_attempt_that_is_killed_is_counted_with_its_cause_and_the_next_goes_on",
            "test_trainer_attempts.py::test_an_attempt_that_hangs_is_killed",
        ),
    ),
    Row(
        "A rank of a trainer of several processes is lost",
        ("code:rank_lost", "error:RanksLost"),
        "is played on meanwhile",
        "waits",
        "`rank_lost` (`RanksLost`), which counts; all ranks start again",
        "each group once",
        ("test_trainer_worker.py::test_a_trainer_that_lost_a_rank_ends_the_attempt_and_its_process",),
    ),
    Row(
        "No step and no piece of an episode for `watchdog.end_s`, although workers and engines are there",
        ("code:no_progress",),
        "is played on meanwhile",
        "waits",
        "the alarm `no_progress` first, then the attempt ends with it, which counts",
        "each group once",
        ("test_trainer_watchdog.py::test_an_attempt_that_stands_still_is_listed_and_the_next_one_goes_on",),
    ),
    Row(
        "`GSPO_MAX_ATTEMPTS` attempts in a row end so, without a new step (`AttemptFailed` each)",
        ("code:max_attempts_exceeded", "error:AttemptFailed"),
        "ends with the job",
        "`dropped_job_over`",
        "`failed`, `max_attempts_exceeded`, with what ended the last one",
        "what was trained stays",
        ("test_store_claims.py::test_a_job_that_loses_trainer_after_trainer_without_a_step_has_failed",),
    ),
    Row(
        "A trainer is asked to leave",
        ("code:handed_over",),
        "is played on meanwhile",
        "waits",
        "the step is ended and saved; `handed_over`, which does not count",
        "each group once",
        ("test_trainer_drains.py::test_the_step_is_ended_and_saved_and_another_trainer_goes_on",),
    ),
    Row(
        "A job makes no progress for `GSPO_YIELD_AFTER_S`, and another one waits for its trainer",
        ("code:yielded",),
        "is played on by another worker when the job comes back",
        "waits in Redis",
        "the step is ended and saved; `queued`, `yielded`, with what it waited for, behind others; does not count",
        "yes, when its turn comes",
        (
            "test_trainer_giving_way.py::test_a_real_run_without_an_engine_gives_way_and_goes_on_where_it_was",
            "test_trainer_giving_way.py::test_a_real_run_whose_world_fails_after_its_first_turn_gives_way",
            "test_trainer_giving_way.py::test_a_real_run_whose_rewards_never_come_gives_way",
        ),
    ),
    Row(
        "A trainer is lost in the middle of a held-out evaluation",
        ("group:dropped_trainer_lost",),
        "is thrown away",
        "`dropped_trainer_lost`",
        "goes on; that evaluation is played again where it is due",
        NO,
        ("test_trainer_run.py::test_rounds_of_evaluation_that_a_lost_trainer_began_leave_the_queue",),
    ),
    Row(
        "The weights diverge: log-probs of the trainer are not finite",
        ("code:learner_diverged",),
        "ends with the job",
        "`dropped_job_over`",
        "`failed`, `learner_diverged`; no engine is blamed",
        "not that batch",
        ("test_trainer_parity.py::test_a_learner_that_diverged_blames_no_engine",),
    ),
    Row(
        "Anything else raises in the trainer: a model that it cannot load, memory of the GPU, a defect (`JobFailure` "
        "where the reason is known)",
        ("code:internal", "code:unknown", "error:JobFailure"),
        "ends with the job",
        "`dropped_job_over`",
        "`failed`, `internal`, with the type and the text of the error (`unknown` where there is none)",
        "not that batch",
        (
            "test_trainer_worker.py::test_an_error_of_the_run_fails_the_job_and_is_its_reason",
            "test_trainer_endings.py::test_an_error_fails_the_job_with_its_cause",
        ),
    ),
    Row(
        "No trainer has what the job wants (`resources.device`)",
        ("code:capacity",),
        "is not begun",
        "is not begun",
        "`queued`, `capacity`",
        LATER,
        ("test_trainer_worker.py::test_a_job_that_this_trainer_cannot_serve_is_left_to_others",),
    ),
    Row(
        "A stored piece of an episode cannot be decoded (`SegmentRejected`: damaged bytes, or another release's)",
        (
            "error:SegmentRejected", "error:BadMagic", "error:UnknownSchema", "error:TruncatedSegment",
            "error:OversizedSegment", "error:MismatchedLengths", "error:CorruptSegment", "error:MalformedMeta",
            "error:NonFiniteSegment", "error:InvalidSegment", "error:IntegrityMismatch", "error:ConflictingSegment",
            "error:ForeignSegment", "group:dropped_unreadable", "alert:segment_refused", "code:incompatible_release",
        ),
        "nothing of it is used",
        "`dropped_unreadable`, and another one is started",
        "the alert `segment_refused` with the reason; eight batches' worth in a row: `failed`, `incompatible_release`",
        NO,
        (
            "test_trainer_intake.py::test_a_group_with_a_segment_of_another_release_is_named_instead_of_waited_for",
            "test_codec.py::test_each_error_is_one_of_ours",
        ),
    ),
)  # fmt: skip

REDIS = (
    Row(
        "Redis is away (`Away`): no connection (`UNREACHABLE`, `NO_CONNECTION`), reading its data (`LOADING`), in a "
        "failover "
        "(`READONLY`, `NOREPLICAS`, `MASTERDOWN`, `CLUSTERDOWN`, `TRYAGAIN`, `UNBLOCKED`), in a script that does not "
        "end "
        "(`BUSY`), without room on its own disk (`MISCONF`)",
        (
            "redis:UNREACHABLE",
            "redis:NO_CONNECTION",
            "redis:LOADING",
            "redis:BUSY",
            "redis:READONLY",
            "redis:NOREPLICAS",
            "redis:MISCONF",
            "redis:MASTERDOWN",
            "redis:CLUSTERDOWN",
            "redis:TRYAGAIN",
            "redis:UNBLOCKED",
            "error:Away",
            "code:redis_unavailable",
        ),
        "waits, with every acknowledged token",
        "waits",
        "the trainer lets it go (`redis_unavailable`, which does not count) and takes it again; the API answers 503",
        "each group once",
        (
            "test_rollout_worker.py::test_a_redis_that_is_killed_and_started_again_costs_no_token",
            "test_redis_refusals.py::test_every_reason_has_an_answer_that_says_what_to_do",
            "test_redis_refusals.py::test_a_trainer_lets_go_of_its_job_and_takes_it_again",
        ),
    ),
    Row(
        "The memory of Redis is full (`OOM`, `OutOfMemory`), or the job has used up `GSPO_REDIS_BYTES_PER_JOB` "
        "(`Full`)",
        ("redis:OOM", "error:OutOfMemory", "error:Full", "alert:redis_full", "alert:redis_has_room"),
        "what was begun is never refused its space by the budget; a full server is waited for",
        "the next ones are started when there is room",
        "goes on; the alerts `redis_full` and `redis_has_room`",
        LATER,
        (
            "test_trainer_budget.py::test_a_server_whose_memory_is_full_is_waited_for",
            "test_bus.py::test_an_admitted_episode_is_never_refused_for_its_bytes",
        ),
    ),
    Row(
        "Redis has lost its newest writes (`Gap`)",
        ("error:Gap",),
        "is leased again, and goes on from what Redis still has",
        "waits",
        "epochs and versions go on from the files",
        "each group once",
        (
            "test_rollout_episode.py::test_a_rolled_back_server_is_noticed",
            "test_store_rebuild.py::test_a_server_that_lost_its_newest_writes_is_told_what_it_forgot",
        ),
    ),
    Row(
        "Redis has lost everything (`Missing`)",
        ("error:Missing",),
        "is lost, unless it was trained",
        "is dispatched again",
        "is rebuilt from its directory and goes on from checkpoint and batch logs",
        "each group once",
        (
            "test_flushall.py::test_redis_is_wiped_in_the_middle_of_a_run",
            "test_lineage.py::test_every_group_is_trained_once_although_redis_is_wiped_again_and_again",
        ),
    ),
    Row(
        "A record of the queue cannot be read (`Damaged`)",
        ("error:Damaged", "code:queue_damaged", "group:dropped_queue_damaged"),
        "one that is unreadable itself is one dead letter; otherwise all that are open are thrown away",
        "`dropped_queue_damaged`, and dispatched again",
        "`queue_damaged`, which counts; the next attempt begins with an empty queue",
        "each group once",
        (
            "test_bus_damaged.py::test_an_unreadable_episode_is_one_dead_letter_and_its_group_goes_on",
            "test_trainer_worker.py::test_a_queue_that_cannot_be_read_is_emptied_for_the_next_attempt",
        ),
    ),
    Row(
        "A job's own record in Redis cannot be read (`DamagedJob`)",
        (),
        "is played on by nobody",
        "waits",
        "no list shows it, its page says why (404), the log of every process says it once; all other jobs go on",
        NO,
        ("test_store_damaged.py::test_one_job_that_cannot_be_read_hides_no_other",),
    ),
    Row(
        "Redis refuses the password (`CredentialsRefused`), a command (`NotPermitted`), or rejects a call for good "
        "(`RedisFault`)",
        ("error:CredentialsRefused", "error:NotPermitted", "error:RedisFault"),
        "waits; the process that is refused says so and ends",
        "waits",
        "with a wrong password the trainer lets it go (`redis_unavailable`); any other fault is `failed`, `internal`",
        NO,
        (
            "test_redis_refusals.py::test_wrong_credentials_are_a_fault_that_no_waiting_mends",
            "test_redis_roles.py::test_nobody_can_do_anything_else",
        ),
    ),
    Row(
        "A process of another release meets this Redis (`LibraryTooOld`, `LibraryTooNew`), or asks for a move that no "
        "job makes (`Forbidden`, `Refused`)",
        ("error:LibraryTooOld", "error:LibraryTooNew", "error:Forbidden", "error:Refused"),
        NOTHING,
        NOTHING,
        "unchanged: nothing was written; a process whose library is too old or too new ends with that sentence",
        NO,
        ("test_store_jobs.py::test_only_transitions_of_the_table_happen",),
    ),
)

DISK = (
    Row(
        "The disk of the data directory is full (`NoRoom`)",
        ("error:NoRoom", "code:disk_full", "alert:disk_full", "alert:disk_has_room"),
        "is played on, until Redis is full too",
        "waits",
        "waits at that write, with the alerts `disk_full` and `disk_has_room`; where it cannot wait the trainer lets "
        "it go "
        "(`disk_full`, which does not count); the API answers 503",
        "each group once",
        (
            "test_trainer_disk.py::test_a_full_disk_is_waited_for",
            "test_trainer_disk.py::test_a_disk_that_is_full_at_the_wrong_moment_is_no_reason_for_a_job_to_end",
        ),
    ),
    Row(
        "Held-out reward falls by more than chance (the alarm `evaluation_fell`), and `watchdog.on_fall` is `slow` or "
        "`go_back`",
        ("alert:fall_answered",),
        "with `go_back`: played anew",
        "with `go_back`: dispatched again, as far as it was not in the best evaluation's weights",
        "the alert `fall_answered`; it goes on with a smaller learning rate, with `go_back` from the checkpoint of its "
        "best evaluation, in another attempt that does not count",
        "with `go_back`: anew",
        (
            "test_trainer_falls.py::test_a_run_that_falls_is_slowed_once",
            "test_trainer_falls.py::test_a_run_that_falls_goes_back_to_its_best_evaluation",
        ),
    ),
    Row(
        "A checkpoint is damaged",
        ("alert:checkpoint_skipped",),
        NOTHING,
        NOTHING,
        "the alert `checkpoint_skipped`; an older one and the batch logs after it lead to the same weights",
        "again, with the same result",
        ("test_checkpoint_zoo.py::test_a_damaged_one_is_passed_over_and_the_logs_lead_to_the_same_weights",),
    ),
    Row(
        "A batch log is damaged (`DamagedBatchLog`), or episodes of it were erased",
        ("alert:batch_log_damaged", "error:DamagedBatchLog"),
        "of that step and those after it: played anew",
        "dispatched again",
        "the alert `batch_log_damaged`; it goes on from the step before",
        "anew",
        (
            "test_trainer_replay.py::test_a_damaged_log_ends_the_row_and_its_groups_are_owed_again",
            "test_trainer_replay.py::test_a_step_with_an_erased_episode_ends_the_row_untouched",
        ),
    ),
    Row(
        "Published weights are damaged (`DamagedVersion`)",
        ("error:DamagedVersion",),
        NOTHING,
        NOTHING,
        "no engine is paused for them; engines keep the version that they have",
        LATER,
        ("test_trainer_engines.py::test_no_engine_is_paused_for_a_damaged_version",),
    ),
    Row(
        "Files cannot be read just now: the volume is away, or an error of the device",
        ("code:data_unreadable",),
        "is played on meanwhile",
        "waits",
        "`data_unreadable`, which counts: nothing is passed over that may be whole",
        "each group once",
        ("test_checkpoint_zoo.py::test_what_cannot_be_read_just_now_is_not_passed_over",),
    ),
    Row(
        "The record of where an attempt began is lost, twice (`LostForkRecord`)",
        ("error:LostForkRecord", "code:data_damaged"),
        "ends with the job",
        "`dropped_job_over`",
        "`failed`, `data_damaged`",
        "what was trained stays",
        ("test_checkpoint_zoo.py::test_a_record_of_an_epoch_that_is_lost_twice_ends_the_job_with_the_reason",),
    ),
    Row(
        "Checkpoints or batch logs of another release (`UnknownLogSchema`), or a specification that this one does not "
        "know",
        ("error:UnknownLogSchema", "code:incompatible_release"),
        "ends with the job",
        "`dropped_job_over`",
        "`failed`, `incompatible_release`: going on without them would silently throw the run away",
        NO,
        (
            "test_checkpoint_zoo.py::test_what_another_release_wrote_is_refused_by_name",
            "test_trainer_worker.py::test_a_specification_of_another_release_ends_the_job_with_the_reason",
        ),
    ),
)

USER = (
    Row(
        "It is being prepared",
        ("code:loading_model",),
        "is not begun, or is played on",
        "waits",
        "`starting` or `resuming`, `loading_model`",
        LATER,
        ("test_store_jobs.py::test_a_transition_is_an_event_with_its_cause",),
    ),
    Row(
        "You pause it",
        ("code:user_paused",),
        "is handed back, and waits",
        "waits",
        "`pausing`, `paused`, `user_paused`",
        LATER,
        ("test_rollout_worker.py::test_a_job_that_is_paused_gets_its_episodes_back_and_goes_on_later",),
    ),
    Row(
        "You cancel it",
        ("code:user_cancelled", "group:dropped_job_over"),
        "ends with the job; with `--drain` what is under way is played to its end",
        "`dropped_job_over`; with `--drain` trained, as far as it fills steps",
        "`cancelling`, `cancelled`, `user_cancelled`",
        "what was trained stays",
        ("test_trainer_endings.py::test_a_running_job_is_cancelled_as_it_was_asked",),
    ),
    Row(
        "All steps are taken, or a condition of `stop` is met",
        ("code:steps_done", "code:reward_reached", "code:reward_stands_still", "code:time_over"),
        "ends with the job",
        "`dropped_job_over`",
        "`succeeded`: `steps_done`, `reward_reached`, `reward_stands_still`, `time_over`",
        "what was trained stays",
        (
            "test_trainer_endings.py::test_all_steps_are_done",
            "test_trainer_endings.py::test_a_condition_ends_the_job_in_order",
        ),
    ),
)
