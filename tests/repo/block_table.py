"""How each fenced block of the pages is held to what is so: executed, by whom, or only judged, and why.

A block that is in no line of ``BLOCKS`` fails a test, so no page grows a command that nothing looks at. Only what is
not typed (no language) and targets of make need no line.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.repo.pages import SHELL, Block


@dataclass(frozen=True)
class By:
    """Another test executes the block, as it finds it on the page."""

    path: str
    test: str


@dataclass(frozen=True)
class Typed:
    """Executed here, by bash, in a folder of its own that looks like a checkout. ``foreign``: programs that write down
    what they are asked; that is judged then."""

    foreign: tuple[str, ...] = ()


@dataclass(frozen=True)
class Judged:
    """Not executed; its commands are judged like those in prose, but whole."""

    reason: str


@dataclass(frozen=True)
class Shown:
    """Nothing to type."""


LIVE = By("tests/e2e/test_pages.py", "test_what_the_pages_type_works_on_a_live_stack")
GSM8K = By("tests/e2e/test_gsm8k_page.py", "test_the_page_leads_from_nothing_to_a_model_that_was_trained")
PLAN = By("tests/core/test_plan_page.py", "test_the_command_of_the_page_says_what_fits")
TIME = Judged("forks and resumed jobs need a job that has been trained; tests/services/trainer makes them")
AGENTS = "tests/services/gateway/test_agents_page.py"
REGISTERED = "tests/services/api/test_api_registered_agents.py"
WORLDS = "tests/environments/test_worlds_page.py"
EVAL = "tests/services/evaluation/test_eval_command.py"
AUTHORS = "tests/core/test_environments_doc.py"
OBJECTIVE = "tests/core/test_objective_docs.py"
HERE = "tests/repo/test_commands.py"
HOUR = By("tests/repo/test_k8s_hour.py", "test_the_overlay_of_the_page_renders_with_its_components_from_its_registry")

# page, what the block contains, how it is held
BLOCKS: list[tuple[str, str, By | Typed | Judged | Shown]] = [
    ("AGENTS.md", "pytest tests/core", By("tests/repo/test_agents.py", "test_the_commands_of_the_page_work")),
    (
        "README.md",
        "held-out success ",
        By("tests/repo/test_readme.py", "test_the_output_of_the_demo_is_that_of_the_demo"),
    ),
    ("README.md", "class Counter", By("tests/repo/test_readme.py", "test_the_environment_of_the_readme_can_be_played")),
    ("README.md", "ref: counter.py", By("tests/repo/test_readme.py", "test_the_job_of_the_readme_is_accepted")),
    ("README.md", "gspo up --model", LIVE),
    ("docs/eval.md", "--out runs/base", By(EVAL, "test_the_commands_of_the_page_work")),
    ("docs/eval.md", "--against", By(EVAL, "test_the_commands_of_the_page_work")),
    ("docs/eval.md", "gspo episodes", By(EVAL, "test_the_commands_of_the_page_work")),
    (
        "docs/agents.md",
        "gspo up  ",
        Judged("tests/e2e/test_agents.py runs the job of the example on a stack of its own"),
    ),
    ("docs/agents.md", "gspo submit guess.yaml", Judged("the model of the job is the reader's")),
    ("docs/agents.md", '"""guess.py"""', By(AGENTS, "test_the_agent_of_the_page_asks_and_is_judged")),
    ("docs/agents.md", '"""fetch.py"""', By(AGENTS, "test_the_loop_of_the_page_fetches_and_plays")),
    ("docs/agents.md", "gspo env validate", By(AGENTS, "test_the_agent_of_the_page_is_examined_and_its_job_is_one")),
    ("docs/agents.md", "# guess.yaml", By(AGENTS, "test_the_agent_of_the_page_is_examined_and_its_job_is_one")),
    (
        "docs/agents.md",
        "gspo env add shop",
        By(REGISTERED, "test_the_command_of_the_page_registers_a_folder"),
    ),
    ("docs/agents.md", '"""primes.py"""', By(AGENTS, "test_the_coding_agent_of_the_page_is_asked_and_judged")),
    ("docs/agents.md", "# coding.yaml", By(AGENTS, "test_the_coding_agent_of_the_page_is_asked_and_judged")),
    ("docs/agents.md", "# judged.yaml", By(AGENTS, "test_the_judge_of_the_page_is_asked_what_it_says")),
    ("docs/agents.md", "rewards:\n", By(AGENTS, "test_the_rewards_of_the_page_are_a_part_of_a_job")),
    ("docs/api.md", "curl ", By("tests/services/api/test_api_docs.py", "test_every_command_on_the_page_works")),
    ("docs/api.md", "from gspo_core.client", LIVE),
    ("docs/api.md", '{"trajectories"', By(HERE, "test_the_pushed_trajectory_is_one")),
    ("docs/api.md", "import openai", By("tests/services/api/test_api_fine_tuning.py", "test_the_page_runs")),
    ("docs/control.md", "gspo set", LIVE),
    (
        "docs/baselines.md",
        "benchmarks.baselines",
        Judged("the grid takes an evening; tests/benchmarks/test_baselines.py runs a small cell and the report"),
    ),
    ("docs/control.md", "tensorboard", Judged("it is not installed; `make test-third-party` reads the files with it")),
    (
        "docs/engines.md",
        "export GSPO_ENGINE_KEYS",
        By("tests/services/engines/test_engine_keys.py", "test_the_keys_of_the_page_are_read"),
    ),
    *(
        (
            "docs/engines.md",
            started,
            By("tests/services/launch/test_engine_command.py", "test_the_command_of_the_page_is_that_of_gspo_up"),
        )
        for started in ("sglang.launch_server", "gspo_vllm.WeightsFromFolder")
    ),
    (
        "docs/engines.md",
        "ScriptedEngine",
        By("tests/services/engines/test_engine_scripted.py", "test_the_example_of_its_page_runs"),
    ),
    ("docs/environments.md", '"""shop.py"""', By(AUTHORS, "test_the_first_environment_prints_what_the_page_says")),
    ("docs/environments.md", "gspo env play", By(AUTHORS, "test_it_can_be_played_as_the_page_says")),
    ("docs/environments.md", "validate shop.py", By(AUTHORS, "test_the_first_environment_prints_what_the_page_says")),
    ("docs/environments.md", "check_environment", By(AUTHORS, "test_the_line_for_tests_works")),
    ("docs/environments.md", '"""leaking.py"""', By(AUTHORS, "test_the_refused_one_is_refused_for_the_reason_given")),
    ("docs/environments.md", "validate leaking", By(AUTHORS, "test_the_refused_one_is_refused_for_the_reason_given")),
    ("docs/environments.md", "# shop.yaml", By(AUTHORS, "test_the_job_is_a_job")),
    ("docs/environments.md", "gspo up", LIVE),
    ("docs/environments.md", "gspo submit", LIVE),
    ("docs/environments.md", '"""delivery.py"""', By(AUTHORS, "test_arguments_arrive_as_declared")),
    ("docs/environments.md", '"""prices.py"""', By(AUTHORS, "test_functions_and_classes_for_trl_work")),
    ("docs/environments.md", '"""mine.py"""', By(AUTHORS, "test_functions_and_classes_for_trl_work")),
    (
        "docs/gsm8k.md",
        "git clone",
        Judged("the set-up takes minutes and a network; `make setup` is what CI begins with, on an empty machine"),
    ),
    (
        "docs/gsm8k.md",
        "pip install",
        Judged("`make test-third-party` installs that package and reads such files with it"),
    ),
    ("docs/gsm8k.md", "gspo fetch Qwen", GSM8K),
    (
        "docs/gsm8k.md",
        "hf download",
        Judged("the hub and the site of the publication cannot be reached from everywhere; the files are typed in"),
    ),
    ("docs/gsm8k.md", "gspo env validate", GSM8K),
    ("docs/gsm8k.md", "gspo up", GSM8K),
    ("docs/gsm8k.md", "# first.yaml", GSM8K),
    ("docs/gsm8k.md", "gspo submit first.yaml", GSM8K),
    ("docs/gsm8k.md", "export", GSM8K),
    ("docs/hosts.md", "hosting =", By(HERE, "test_what_an_author_may_say_of_hosts_is_so")),
    ("docs/hosts.md", "# /// script", By(HERE, "test_what_an_author_may_say_of_hosts_is_so")),
    ("docs/objective.md", "gspo_core.objective import", By(OBJECTIVE, "test_the_code_runs")),
    ("docs/objective.md", "gspo_core.advantage import", By(OBJECTIVE, "test_the_code_runs")),
    ("docs/objective.md", "gates_off =", By(OBJECTIVE, "test_the_recipes_reproduce_the_other_projects")),
    ("docs/objective.md", "objective:\n", By(OBJECTIVE, "test_the_job_file_shows_the_defaults")),
    ("docs/performance.md", "gspo profile", LIVE),
    ("docs/plan.md", "gspo plan", PLAN),
    ("docs/operations.md", "TORCH_WHEELS=", Typed(("docker", "gspo"))),
    ("docs/operations.md", "run --rm -T secrets", Typed(("docker",))),
    (
        "docs/operations.md",
        "docker push",
        Judged("it pushes to a registry; make real-k8s builds these images"),
    ),
    (
        "docs/operations.md",
        "cp -r k8s/overlays/dev",
        HOUR,
    ),
    (
        "docs/operations.md",
        "components: [",
        HOUR,
    ),
    ("docs/operations.md", "--from-file=secrets/$role", Typed(("kubectl",))),
    ("docs/operations.md", "cat secrets/api/", Typed(("gspo",))),
    ("docs/operations.md", "--from=cronjob/backup", Typed(("kubectl",))),
    ("docs/operations.md", "scale statefulset engine", Typed(("kubectl",))),
    ("docs/operations.md", "--from=cronjob/restore", Typed(("kubectl",))),
    (
        "docs/operations.md",
        "gspo export JOB@60",
        Judged("tests/services/trainer/test_trainer_exports.py has a trainer export; the rest copies and plays"),
    ),
    ("docs/operations.md", "> data.tar.gz", Typed(("docker",))),
    ("docs/operations.md", "< data.tar.gz", Typed(("docker",))),
    ("docs/operations.md", "gspo snapshot save", Typed(("gspo",))),
    ("docs/launch.md", "gspo launch slurm", Typed(("sbatch",))),
    ("docs/launch.md", "gspo launch ray", Judged("it runs on a Ray cluster; tests/e2e/test_ray.py runs it on one")),
    ("docs/time-machine.md", "gspo audit", Judged("tests/core/test_audit.py audits, signs and finds what was changed")),
    ("docs/time-machine.md", "gspo bundle", Judged("tests/core/test_bundle.py packs and opens bundles")),
    ("docs/time-machine.md", "gspo rescore", Judged("tests/core/test_rescore.py judges recorded episodes")),
    ("docs/time-machine.md", "gspo tables", Judged("tests/core/test_tables.py writes tables and reads them back")),
    ("docs/time-machine.md", "gspo retrain", TIME),
    ("docs/time-machine.md", "gspo fork JOB@40 --set", TIME),
    ("docs/time-machine.md", "gspo resume", TIME),
    ("docs/time-machine.md", "gspo replay JOB", By("tests/core/test_replay.py", "test_the_commands_of_the_page_work")),
    (
        "docs/ranks.md",
        "torchrun",
        Judged("it runs for good; tests/services/trainer/test_trainer_ranks.py starts the same"),
    ),
    (
        "docs/staleness.md",
        "simulate",
        By("tests/core/test_staleness_page.py", "test_the_example_runs_and_shows_that_more_pace_is_more_throughput"),
    ),
    (
        "docs/worlds.md",
        '"""shop_v1.py"""',
        By(WORLDS, "test_a_taskset_of_verifiers_plays_at_the_gateway_and_scores_itself"),
    ),
    (
        "docs/worlds.md",
        "# shop_agent.py",
        By(WORLDS, "test_a_taskset_of_verifiers_plays_at_the_gateway_and_scores_itself"),
    ),
    (
        "docs/worlds.md",
        "# verifiers.yaml",
        By(WORLDS, "test_a_taskset_of_verifiers_plays_at_the_gateway_and_scores_itself"),
    ),
    ("docs/worlds.md", "# textarena.yaml", By(WORLDS, "test_games_of_textarena_do_not_disturb_each_other")),
    ("docs/worlds.md", "# reasoning.yaml", By(WORLDS, "test_a_mixture_of_data_sets_is_scored_by_each_of_them")),
    (
        "docs/worlds.md",
        '"""desk_reward.py"""',
        By(WORLDS, "test_a_server_of_mcp_has_its_own_packages_environment_and_folder"),
    ),
    ("docs/worlds.md", "# mcp.yaml", By(WORLDS, "test_a_server_of_mcp_has_its_own_packages_environment_and_folder")),
    ("docs/worlds.md", "# lake.yaml", By(WORLDS, "test_the_lake_of_the_page_is_crossed")),
    (
        "docs/worlds.md",
        "# harbor.yaml",
        By("tests/environments/test_harbor.py", "test_the_job_of_the_page_plays_the_examples"),
    ),
    ("docs/worlds.md", "# openenv.yaml", By(WORLDS, "test_a_server_of_openenv_is_named_by_its_address")),
    (
        "environments/README.md",
        "class Counter",
        By("tests/environments/test_environments_page.py", "test_the_example_of_the_page_runs"),
    ),
    ("k8s/README.md", "kubectl apply", Typed(("kubectl",))),
    (
        "release/README.md",
        "release.cut",
        Judged("it writes files of the checkout; tests/repo/test_release.py cuts a copy"),
    ),
]


# Blocks that need no line.
TARGETS = Judged("targets take minutes, and `make test` is what runs this; here it is `make -n`")


def held(one: Block) -> list[By | Typed | Judged | Shown]:
    lines = [how for page, containing, how in BLOCKS if page == one.page and containing in one.text]
    if not lines and one.language in ("", "text"):
        return [Shown()]
    if not lines and one.language in SHELL and all(line.startswith("make ") for line in one.typed.splitlines() if line):
        return [TARGETS]
    return lines
