"""Options of environments and of their trials. A factory of `env=...` takes `EnvironmentOptions`.

Options that only training uses are in separate classes, because `python -m src.evaluate` does not have them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import chz

from src.core.errors import ConfigError
from src.core.length_limits import LengthOptions
from src.core.options import Options, SeedOptions, above, at_least, finite, is_default, pairs, require
from src.learning.options import StepWiseOptions
from src.policy.options import BackendOptions, JudgeEndpointOptions, ModelOptions

DOWNLOADS = {"terminal-bench-2": "scripts/setup.sh terminal-bench-2"}
"""Name of a directory of tasks -> command that downloads the directory to datasets/."""
HARBOR_ONLY = (
    *("environment_type", "max_consecutive_truncations", "jobs_quota_gb"),
    *("agent_timeout_multiplier", "verifier_timeout_multiplier"),
    "proactive_summarization_threshold",
)
DATA = "data"  # the environment that data= selects
OPENENV_TASKS = "environment_kwargs=tasks=NUMBER"
# Option -> environment that does not read the option -> the options to use instead.
INSTEAD_OF = {
    "train_data": {"harbor": "tasks_dir", "openenv": OPENENV_TASKS, DATA: "data"},
    "tasks_dir": {"fleet": "train_data or test_data", "openenv": OPENENV_TASKS, DATA: "data"},
    "test_data": {
        "harbor": "eval_tasks in training, or tasks in an evaluation",
        "openenv": "eval_split or eval_tasks in training, or tasks in an evaluation",
    },
}
WITHOUT_TAU2 = ("harbor", "fleet", "openenv", DATA)  # environments that do not read tau2_home


@chz.chz
class TaskOptions(SeedOptions):
    """Environment and tasks"""

    env: str = chz.field(
        default="harbor",
        munger=lambda settings, env: DATA if settings.data and env == "harbor" else env,
        doc="Kind of environment: harbor, tau_bench, fleet, openenv, data, one that a package registers, or "
        "your own as module:factory",
    )
    data: list[str] | None = chz.field(
        default=None,
        doc="Questions with answers: .jsonl or .parquet files; selects env=data and needs reward",
    )
    reward: str | None = chz.field(
        default=None,
        doc="Reward of env=data: exact, number, regex, math, or a function of your own as module:function",
    )
    tasks_dir: str | None = chz.field(
        default=None,
        doc="env=harbor: directory of Harbor task directories (each with task.toml, instruction.md, tests/); "
        "env=tau_bench: directory with db.json, policy.md and tasks.json of the built-in domain toy_retail",
    )
    environment_kwargs: list[str] | None = chz.field(
        default=None, doc="Settings of the environment as key=value,..."
    )
    test_data: list[str] | None = chz.field(
        default=None,
        doc="Held-out tasks, which replace those of the environment and of eval_split: .jsonl or .parquet "
        "files of rows. env=fleet reads only .jsonl. env=tau_bench also reads DOMAIN:SPLIT. With "
        "env=tau_bench and env=data, a prefix NAME= makes NAME the domain of the tasks in metrics",
    )

    @property
    def environment_options(self) -> dict[str, str]:
        """The pairs of `environment_kwargs`."""
        return pairs(self.environment_kwargs, option="environment_kwargs")

    @chz.validate
    def _environment_kwargs_are_pairs(self) -> None:
        assert self.environment_options is not None

    def require_env(self, env: str, name: str) -> None:
        """Raise ValueError if the option `name`, which only `env` has, is set for another environment."""
        require(
            self.env == env or is_default(self, name),
            f"{name} is for env={env}, not env={self.env}; remove {name}",
        )

    def require_read(self, name: str) -> None:
        """Raise ValueError if the option `name` is set and the environment does not read it."""
        instead = INSTEAD_OF[name].get(self.env)
        require(
            instead is None or is_default(self, name),
            f"{name} is not for env={self.env}; use {instead}",
        )

    @chz.validate
    def _data_has_a_reward(self) -> None:
        if self.env != DATA:
            for name in ("data", "reward"):
                self.require_env(DATA, name)
            return
        require(bool(self.data or self.test_data), "env=data needs data=FILE.jsonl or data=FILE.parquet")
        require(
            self.reward is not None,
            "missing: reward; write reward=exact, number, regex, math or module:function",
        )

    @chz.validate
    def _environment_reads_files(self) -> None:
        self.require_read("tasks_dir")
        self.require_read("test_data")


@chz.chz
class SplitOptions(TaskOptions):
    """Environment and tasks"""

    train_data: list[str] | None = chz.field(
        default=None,
        doc="Training tasks of env=tau_bench, env=fleet or your own environment: .jsonl or .parquet files of "
        "rows. env=fleet reads only .jsonl. env=tau_bench also reads DOMAIN:SPLIT, and adds the tasks to "
        "those of environment_kwargs=domain=...",
    )
    eval_split: float = chz.field(
        default=0.2,
        doc="Share of the tasks held out if there is neither eval_tasks, test_data nor a test split of the "
        "environment; 0: none",
    )
    eval_tasks: list[str] | None = chz.field(
        default=None,
        doc="Held-out tasks: ids or globs, or (env=harbor) directories of tasks; eval_split is then ignored",
    )

    @chz.validate
    def _environment_reads_train_data(self) -> None:
        self.require_read("train_data")

    @chz.validate
    def _tasks_can_be_split(self) -> None:
        require(0 <= self.eval_split < 1, f"eval_split must be at least 0 and below 1, not {self.eval_split}")


@chz.chz
class AgentOptions(LengthOptions):
    """Agent and lengths"""

    max_turns: int | None = chz.field(
        default=None, doc="Turns per trial; None: no limit", validator=at_least(1)
    )
    temperature: float = chz.field(default=0.7, doc="Sampling temperature", validator=[at_least(0), finite])
    use_native_tool_calling: bool = chz.field(
        default=False,
        doc="Describe an environment's tools with the model's chat template if the environment and the "
        "template allow it; otherwise as text",
    )


@chz.chz
class TrialOptions(Options):
    """Trials"""

    n_parallel_envs: int = chz.field(default=8, doc="Trials running at once", validator=at_least(1))
    trial_timeout_s: float | None = chz.field(
        default=None,
        doc="Time limit of each attempt of a trial, in seconds; None: two hours",
        validator=above(0),
    )


@chz.chz
class HarborOptions(ModelOptions, TrialOptions, TaskOptions, AgentOptions):
    """Harbor trials and Terminus-2"""

    environment_type: Literal["auto", "docker", "sandbox", "daytona", "modal", "e2b", "runloop"] = chz.field(
        default="auto",
        doc="Where trials run; auto: Docker if an engine answers and can run the tasks, else the sandbox",
    )
    jobs_quota_gb: float = chz.field(
        default=20.0,
        doc="Maximum size of the run's jobs/ directory in GiB; above it, a trial keeps only its result, "
        "reward and log",
        validator=above(0),
    )
    agent_timeout_multiplier: float = chz.field(
        default=1.0,
        doc="Factor for the agent's time limit in task.toml, as in `harbor run`",
        validator=above(0),
    )
    verifier_timeout_multiplier: float = chz.field(
        default=1.0,
        doc="Factor for the verifier's time limit in task.toml, as in `harbor run`",
        validator=above(0),
    )
    max_consecutive_truncations: int = chz.field(
        default=3,
        doc="End a trial after this many answers in a row that were empty or cut at max_tokens",
        validator=at_least(1),
    )
    enable_summarize: bool = chz.field(
        default=True, doc="Let Terminus-2 summarise its history when the context runs out"
    )
    proactive_summarization_threshold: int = chz.field(
        default=8000,
        doc="Summarise once fewer tokens than this are free; 0: only when the context is full",
        validator=at_least(0),
    )

    @property
    def lengths_to_fit(self) -> dict[str, int]:
        """The lengths that must fit the context of the model, by option. `src.policy.served_model` adapts
        them to the server.
        """
        lengths = {"context_limit": self.context_limit, "max_tokens": self.max_tokens}
        if self.env == "harbor":
            lengths["proactive_summarization_threshold"] = self.proactive_summarization_threshold
        return lengths

    @chz.validate
    def _harbor_has_what_it_needs(self) -> None:
        for name in HARBOR_ONLY:
            self.require_env("harbor", name)
        if self.env != "harbor":
            return
        require(
            self.tasks_dir is not None,
            "missing: tasks_dir; write tasks_dir=DIRECTORY, a directory of Harbor tasks (--help lists the "
            "options)",
        )
        require(
            not self.use_native_tool_calling,
            "use_native_tool_calling: Terminus-2 does not call tools; remove use_native_tool_calling",
        )
        limits, threshold = self.length_limits, self.proactive_summarization_threshold
        longest_input = min(limits.max_input_length, self.context_limit - limits.max_generate_length)
        require(
            not self.enable_summarize or threshold < longest_input,
            f"proactive_summarization_threshold={threshold} would summarise every turn, because a prompt has "
            f"at most {longest_input} tokens; set it below {longest_input}, or set enable_summarize=false",
        )


@chz.chz
class HarborTrainingOptions(HarborOptions):
    """Harbor trials and Terminus-2"""

    train_subagents: Literal["none", "all"] = chz.field(
        default="none", doc="all: also train the answers of Terminus-2's summarising sub-agents"
    )

    @chz.validate
    def _harbor_alone_has_subagents(self) -> None:
        self.require_env("harbor", "train_subagents")


@chz.chz
class TauBenchOptions(JudgeEndpointOptions, BackendOptions, TaskOptions):
    """tau-bench"""

    tau2_home: str | None = chz.field(
        default=None,
        doc="Directory of Sierra's tau2-bench that scripts/setup_tau.sh made (env=tau_bench); None: the "
        "environment variable TAU2_HOME",
    )

    @chz.validate
    def _environment_reads_tau2_home(self) -> None:
        if self.env in WITHOUT_TAU2:
            self.require_env("tau_bench", "tau2_home")


@chz.chz
class EnvironmentOptions(StepWiseOptions, SplitOptions, HarborTrainingOptions, TauBenchOptions):
    """All environments"""


def environment_options(options: TaskOptions, *, url: str | None) -> EnvironmentOptions:
    """Return the options of the environment for a program that does not split the tasks.

    `url` is the address of an endpoint that is not a Tinker endpoint; None: the backend and the address
    in `options` are used.
    """
    # In an evaluation, train_data has another meaning: it names tasks that must not be evaluated.
    names = chz.chz_fields(EnvironmentOptions).keys() - {"train_data"}
    values = {name: value for name, value in chz.asdict(options).items() if name in names}
    if url is not None:  # EnvironmentOptions requires the address of a server
        values |= {"backend": "skyrl-tx", "skyrl_tx_url": url, "tinker_base_url": None}
    return EnvironmentOptions(**values, eval_split=0.0)


def require_task_directory(tasks_dir: str | Path) -> Path:
    """Return `tasks_dir` as an absolute path. Raises ConfigError if it is not a directory."""
    directory = Path(tasks_dir).expanduser()
    if not directory.is_dir():
        download = DOWNLOADS.get(directory.name)
        advice = f"download it with {download}" if download else "give a directory of task directories"
        raise ConfigError(f"tasks_dir {tasks_dir} is not a directory; {advice}")
    return directory.resolve()
