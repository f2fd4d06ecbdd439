"""The recipe: one TOML file for a whole run, read into frozen models that every service shares.

Torch-free and import-cheap, so that a mistake is reported before anything heavy starts. An
unknown key is an error that names the file, the key and the nearest valid key. Precedence: `--set
a.b=c` over the environment (`HEADRACE_A__B=c`) over the file over the defaults here.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from services.common import (
    alerts_config,
    custom_metrics,
    generation_config,
    recipe_text,
    secret_keys,
    weights_config,
)
from services.common.alerts_config import Alerts, Mirrors
from services.common.custom_metrics import CustomMetric
from services.common.errors import UserError
from services.common.generation_config import Environments, Generation, Generator, Tools
from services.common.section import Section
from services.common.traces_config import Traces
from services.common.training_config import (
    Advantage,
    Checkpoint,
    Evaluation,
    Loss,
    Optimizer,
    Trainer,
)
from services.common.weights_config import Weights

ENVIRONMENT_PREFIX = "HEADRACE_"
"""Environment variables `HEADRACE_SECTION__KEY` override the recipe; others with this prefix are
errors."""

RUN_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?")
"""Run names are valid in Kubernetes and inside a Redis hash tag."""

QUERY_PASSWORD = re.compile(r"([?&]\w*password=)[^&]*")
"""A password behind the question mark of a URL: `?sentinel_password=…`."""

USER_PASSWORD = re.compile(r"(://[^:/@]*:).*(?=@)")
"""What `scheme://user:` precedes up to the last @."""

IDENTITY = (
    *("model", "data", "generation", "tools", "environments"),
    *("rewards", "advantage", "loss", "optimizer"),
)
"""Sections that make two runs the same experiment, beside a few keys of the trainer's."""

ENVIRONMENT_REWARD = "environment"
"""The built-in reward function that gives what a conversation's environment says."""

HOLDS_PASSWORD = (("queue", "url"), ("aggregator", "database"))
"""Keys whose value is a URL that may hold a password."""


class RecipeError(UserError):
    """A user's mistake in the recipe or an override; the message says where and what to do."""


class Model(Section):
    """What is trained."""

    path: str = "tiny:arithmetic"
    """A Hugging Face folder; or `tiny:NAME`, a small model that `headrace tiny-model` makes and
    caches."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the trainer's forward, the published weights and the engines."""


class ReasoningGym(Section):
    """Prompts from the reasoning-gym package: a task generator by name, with its parameters."""

    task: str
    """The generator's name: "chain_sum"."""
    size: Annotated[int, Field(ge=1)] = 1000
    """Rows to generate."""
    seed: int = 0
    """Rows are a function of task, parameters and seed."""
    params: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies it
    """The generator's own configuration, passed on as it is."""


class Data(Section):
    """Where prompts come from: exactly one of `reasoning_gym`, `file` and `dataset`."""

    reasoning_gym: ReasoningGym | None = None
    """A generated task."""
    file: str | None = None
    """A JSONL or Parquet file."""
    dataset: str | None = None
    """A Hugging Face dataset: a name on the hub or a folder."""
    split: str = "train"
    """The split of `dataset`."""
    prompt_column: str = "prompt"
    """Holds a text, or a list of {role, content} messages. reasoning-gym rows have `question` and
    `answer`; there the default means `question`."""
    system_prompt: str | None = None
    """Put before every prompt that is a text."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the rows, in distinct prompts; fractions are allowed. Without it
    `trainer.max_steps` ends the run."""
    shuffle: bool = True
    """A new order each epoch, from `seed`."""
    seed: int = 0
    """Of the order."""


class RewardFunction(Section):
    """One reward function."""

    function: str
    """`module:function`. Built in: `reasoning_gym` and `exact_match`."""
    weight: float = 1.0
    """Factor in the conversation's total."""
    name: str | None = None
    """In metrics, `rewards/NAME`; the function's own name by default."""
    params: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies it
    """Keyword arguments for every call."""


class Rewards(Section):
    """How conversations are scored."""

    functions: Annotated[tuple[RewardFunction, ...], Field(strict=False)] = (
        RewardFunction(function="reasoning_gym"),
    )
    """Summed by weight, over those that do not abstain."""
    on_abstain: Literal["sum_present", "unscored"] = "sum_present"
    """A function abstains (None): sum the others, or leave the conversation unscored."""
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Of one call; a call cut off counts as an abstention, visibly."""
    workers: Annotated[int, Field(ge=1)] = 2
    """Worker processes for sync functions, in one scorer."""


class Scorer(Section):
    """The scorer service."""

    replicas: Annotated[int, Field(ge=1)] = 1
    """Processes that `headrace run` starts."""
    max_groups: Annotated[int, Field(ge=1)] = 8
    """Groups at a time in one replica."""


class Queue(Section):
    """The Redis-protocol server and the rules of delivery."""

    url: str | None = None
    """`redis://host:6379/0`, `unix:///path/of/socket`, `redis+sentinel://h1:26379,h2:26379/NAME` or
    `redis+cluster://h1:6379,h2:6379`; `rediss` for TLS, `user:password@` before the host. Without
    it `headrace run` starts an embedded server. More in docs/delivery.md."""
    password_file: str | None = None
    """File with the password of the URL's user, in place of one in the URL."""
    claim_after_s: Annotated[float, Field(gt=0)] = 30.0
    """An entry not renewed for so long is taken over by another worker."""
    max_work_s: Annotated[float, Field(gt=0)] = 3600.0
    """Longest work on one entry (time blocked by capacity not counted); then renewal stops."""
    max_deliveries: Annotated[int, Field(ge=2)] = 3
    """An entry that killed its worker so often goes to the dead letters."""
    groups_capacity: Annotated[int, Field(ge=1)] = 64
    """Groups that may wait for a scorer."""
    samples_capacity: Annotated[int, Field(ge=1)] | None = None
    """Groups that may wait for the trainer; 4 x groups_per_step by default."""
    max_tries: Annotated[int, Field(ge=1)] = 3
    """Tries of a prompt whose groups fail; then it is given up."""
    max_stale_tries: Annotated[int, Field(ge=1)] = 8
    """Tries of a prompt whose groups become stale; then it is given up."""
    dead_max_entries: Annotated[int, Field(ge=1)] = 1000
    """Dead letters kept."""
    dead_max_bytes: Annotated[int, Field(ge=1)] = 256 << 20
    """Bytes of dead letters kept."""


class Aggregator(Section):
    """The aggregator."""

    database: str | None = None
    """An SQLAlchemy URL; SQLite under the run folder by default."""
    database_password_file: str | None = None
    """File with the password of the URL's user, in place of one in the URL."""
    http_port: Annotated[int, Field(ge=0, le=65535)] = 8080
    """REST, docs and the page; 0 takes a free port."""
    keep_runs_days: Annotated[float, Field(gt=0, le=36_500)] | None = None
    """A run is deleted so long after it was last heard of, unless it says otherwise (`headrace
    runs keep`); without it never."""


class Ledger(Section):
    """What the aggregator keeps of each group: counts of all, details of some."""

    keep_groups: Annotated[int, Field(ge=1)] = 100_000
    """Groups kept in detail beside those in flight (about 0.4 KB each); of older ones it stays
    known what became of them."""
    stuck_after_s: Annotated[float, Field(gt=0)] = 600.0
    """A group in flight for longer is named as stuck."""


class Recorder(Section):
    """How services send metrics."""

    flush_s: Annotated[float, Field(gt=0)] = 2.0
    """Seconds between two batches."""
    buffer_partials: Annotated[int, Field(ge=100)] = 20_000
    """Partials kept while the aggregator is away; beyond that they are merged, then dropped and
    counted."""


class Network(Section):
    """Where services find each other, and how they listen."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 in containers."""
    grpc_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """This service's gRPC port; 0 takes a free one."""
    health_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """grpc.health.v1, plaintext, for probes; 0 takes a free one."""
    trainer: str = "127.0.0.1:50051"
    """gRPC address of the trainer."""
    aggregator: str = "127.0.0.1:50052"
    """gRPC address of the aggregator."""
    ranks: str | None = None
    """HOST:PORT where ranks on other nodes meet rank 0, which listens there; needed with
    `trainer.nodes` above 1, unused otherwise."""
    token_file: str | None = None
    """File with the bearer token that all gRPC and REST calls then need; of several lines the first
    is sent and all are accepted."""
    tls_cert_file: str | None = None
    """PEM certificate (chain) of this service; with the next two, gRPC is mutual TLS and REST is
    HTTPS."""
    tls_key_file: str | None = None
    """PEM key of that certificate."""
    tls_ca_file: str | None = None
    """PEM certificates of who may sign the certificates of others."""
    peer_name: str | None = None
    """Name in the certificate of every generator. With TLS, generators that fetch weights from each
    other call addresses and expect this name; without it, the address."""
    max_message_bytes: Annotated[int, Field(ge=1 << 20)] = 256 << 20
    """Largest gRPC message, on both sides."""
    max_connections: Annotated[int, Field(ge=1)] = 1024
    """Connections at a time to each of a service's servers; beyond them new ones are refused."""
    max_requests_per_s: Annotated[float, Field(gt=0)] = 1000.0
    """Calls of one peer's address a second, gRPC and REST apart; what is above is refused, and may
    be repeated a moment later."""


class Recipe(Section):
    """Everything about a run."""

    run: str = "run"
    """Its name, in Redis keys, folders and URLs."""
    folder: str = "runs"
    """Runs live in `folder/run`."""
    model: Model = Model()
    data: Data = Data()
    generation: Generation = Generation()
    generator: Generator = Generator()
    tools: Tools = Tools()
    environments: Environments = Environments()
    rewards: Rewards = Rewards()
    scorer: Scorer = Scorer()
    advantage: Advantage = Advantage()
    loss: Loss = Loss()
    optimizer: Optimizer = Optimizer()
    trainer: Trainer = Trainer()
    weights: Weights = Weights()
    checkpoint: Checkpoint = Checkpoint()
    evaluation: Evaluation = Evaluation()
    queue: Queue = Queue()
    aggregator: Aggregator = Aggregator()
    ledger: Ledger = Ledger()
    alerts: Alerts = Alerts()
    mirrors: Mirrors = Mirrors()
    recorder: Recorder = Recorder()
    traces: Traces = Traces()
    network: Network = Network()
    metrics: dict[str, CustomMetric] = {}  # noqa: RUF012 - pydantic copies it

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        mistakes = list(self._contradictions())
        if mistakes:
            raise ValueError("\n".join(mistakes))
        return self

    def _contradictions(self) -> Iterator[str]:
        """What is wrong between keys, one line each."""
        if not RUN_NAME.fullmatch(self.run):
            yield (
                f"run = {self.run!r}: use lower-case letters, digits and hyphens, at most 52, "
                "with a letter or digit at both ends"
            )
        if not self.rewards.functions:
            yield "rewards.functions: give at least one"
        sources = [self.data.reasoning_gym, self.data.file, self.data.dataset]
        if sum(source is not None for source in sources) != 1:
            yield "data: give exactly one of data.reasoning_gym, data.file and data.dataset"
        if self.trainer.max_steps is None and self.data.epochs is None:
            yield "trainer.max_steps or data.epochs must say when the run ends: give one or both"
        if self.token_budget < self.generator.max_model_len:
            yield (
                f"trainer.token_budget: {self.token_budget} is below generator.max_model_len "
                f"({self.generator.max_model_len}); a full conversation would not fit a row"
            )
        seats = self.generator.max_num_seqs
        if seats is not None and seats > self.generator.max_inflight:
            yield (
                f"generator.max_num_seqs: {seats} is above generator.max_inflight "
                f"({self.generator.max_inflight}); that many would never be there to sample"
            )
        if self.generation.max_completion_tokens >= self.generator.max_model_len:
            yield (
                f"generation.max_completion_tokens: {self.generation.max_completion_tokens} must "
                f"be below generator.max_model_len ({self.generator.max_model_len}): no room is "
                "left for a prompt"
            )
        if self.trainer.rows == "samples" and self.trainer.samples_per_row is None:
            yield (
                'trainer.samples_per_row: say how many, since trainer.rows = "samples"; or take '
                'rows = "tokens", which fills rows up to trainer.token_budget'
            )
        if self.trainer.rows == "tokens" and self.trainer.samples_per_row is not None:
            yield (
                f"trainer.samples_per_row: {self.trainer.samples_per_row} has no meaning with "
                'trainer.rows = "tokens"; leave it out, or set rows = "samples"'
            )
        if self.trainer.refill and self.zero_signal != "skip":
            yield (
                "trainer.refill: only groups that are skipped for want of signal have others in "
                f'their place, and here zero_signal is "{self.zero_signal}"; set '
                'trainer.zero_signal = "skip" or leave refill out'
            )
        if self.trainer.max_refill is not None and not self.trainer.refill:
            yield (
                f"trainer.max_refill: {self.trainer.max_refill} has no meaning without "
                "trainer.refill; set trainer.refill = true or leave it out"
            )
        if self.samples_capacity < self.trainer.groups_per_step:
            yield (
                f"queue.samples_capacity: {self.samples_capacity} is below trainer.groups_per_step "
                f"({self.trainer.groups_per_step}); a step could never fill"
            )
        yield from self._mistakes_of_nodes()
        if self.evaluation.every_expression and (
            self.data.reasoning_gym is None or self.data.reasoning_gym.task != "chain_sum"
        ):
            yield "evaluation.every_expression: only for data.reasoning_gym.task = chain_sum"
        yield from self.loss.mistakes()
        yield from weights_config.mistakes(self.weights, self.trainer)
        yield from generation_config.mistakes(self.environments, self.tools)
        rewards = {each.function for each in self.rewards.functions}
        if ENVIRONMENT_REWARD in rewards and not self.environments.classes:
            yield (
                f"rewards.functions: {ENVIRONMENT_REWARD!r} gives an environment's own reward, and "
                "environments.classes has none"
            )
        yield from custom_metrics.mistakes(self.metrics)
        yield from alerts_config.mistakes(self.alerts)
        yield from secret_keys.mistakes(self)
        yield from self.traces.mistakes(max_message_bytes=self.network.max_message_bytes)

    def _mistakes_of_nodes(self) -> Iterator[str]:
        """What is wrong with a trainer on several machines, one line each."""
        ranks, nodes, address = self.trainer.ranks, self.trainer.nodes, self.network.ranks
        if ranks % nodes:
            yield (
                f"trainer.ranks: {ranks} cannot be spread evenly over trainer.nodes = {nodes}; set "
                f"it to a multiple of {nodes}"
            )
        if address is None:
            if nodes > 1:
                yield (
                    f"network.ranks: with trainer.nodes = {nodes} say at which HOST:PORT ranks on "
                    "other nodes meet rank 0"
                )
            return
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            yield f"network.ranks: {address!r} is no HOST:PORT, as trainer.example:29500 is"

    @property
    def token_budget(self) -> int:
        """Unique tokens of one packed row."""
        return self.trainer.token_budget or self.generator.max_model_len

    @property
    def trained_token_budget(self) -> int:
        """Trained tokens of one packed row."""
        return self.trainer.trained_token_budget or self.token_budget

    @property
    def zero_signal(self) -> Literal["skip", "keep"]:
        """What happens to groups whose advantages are all 0: a KL to a reference is a signal."""
        return self.trainer.zero_signal or ("keep" if self.loss.kl_coefficient else "skip")

    @property
    def samples_capacity(self) -> int:
        """Groups that may wait for the trainer."""
        return self.queue.samples_capacity or 4 * self.trainer.groups_per_step

    @property
    def max_refill(self) -> int:
        """Groups that a step may have beyond `trainer.groups_per_step`, in the place of such
        without signal."""
        trainer = self.trainer
        return (trainer.max_refill or trainer.groups_per_step) if trainer.refill else 0

    @property
    def max_outstanding(self) -> int:
        """Groups between dispatch and settlement, at most (architecture: pace first, drop last)."""
        trainer = self.trainer
        return (trainer.max_staleness * trainer.weight_sync_steps + 1) * trainer.groups_per_step

    @property
    def run_folder(self) -> Path:
        """Where logs, checkpoints and the summary of this run are."""
        return Path(self.folder) / self.run

    def identity(self) -> str:
        """Hex digest of what makes two runs the same experiment: model, data, conversations,
        rewards, loss, seeds."""
        text = json.dumps(self.experiment(), sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def experiment(self) -> dict[str, Any]:
        """What `identity()` is a digest of. How long the run is does not belong to it."""
        trainer = self.trainer.model_dump(include={"groups_per_step", "seed"})
        trainer |= {"zero_signal": self.zero_signal, "max_refill": self.max_refill}
        if self.trainer.lora is not None:  # so that runs without one are what they were
            trainer["lora"] = self.trainer.lora.model_dump(exclude={"publish"})
        content = {name: getattr(self, name).model_dump() for name in IDENTITY}
        del content["data"]["epochs"]
        return content | {"trainer": trainer}


def load(
    path: Path, *, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Recipe:
    """Read a recipe, apply the environment's and then the command line's overrides, and validate.

    `overrides` are `a.b=c`; c is read as a TOML value where it is one, else (or where the key
    holds a text) as a text; list elements are named by position (`rewards.functions.0.weight=2`).
    Relative `file`, `path` and `folder` entries mean what they say from the working directory.
    Raises RecipeError with all mistakes at once, one a line.
    """
    source = recipe_text.Source(path=path, model=Recipe)
    try:
        tree = recipe_text.read(path)
        for name, text in sorted((os.environ if environ is None else environ).items()):
            if name.startswith(ENVIRONMENT_PREFIX):
                keys = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
                source.place(tree, keys, text, origin=f"environment variable {name}")
        for override in overrides:
            key, separator, text = override.partition("=")
            if not separator or not key.strip():
                raise ValueError(f"--set {override}: write it as --set key.in.recipe=value")
            keys = key.strip().split(".")
            source.place(tree, keys, text, origin=f"--set {key.strip()}")
        return Recipe.model_validate(tree)
    except ValidationError as error:
        lines = [line for mistake in error.errors() for line in source.explain(mistake)]
        raise RecipeError("\n".join(lines)) from None
    except ValueError as error:
        raise RecipeError(str(error)) from None


def dump_toml(recipe: Recipe, *, hide_passwords: bool = False) -> str:
    """The resolved recipe as TOML, defaults included: load() of it gives an equal recipe.

    `hide_passwords` is for showing it: passwords in URLs become `***`, and all of a webhook but its
    host.
    """
    tree = recipe.model_dump(exclude_none=True)
    if hide_passwords:
        for section, key in HOLDS_PASSWORD:
            if key in tree[section]:
                tree[section][key] = without_passwords(tree[section][key])
        if recipe.alerts.webhook is not None:
            tree["alerts"]["webhook"] = alerts_config.hidden_url(recipe.alerts.webhook)
    return recipe_text.write(tree)


def without_passwords(url: str) -> str:
    """A URL for people and logs: `redis://me:secret@host` is `redis://me:***@host`."""
    return USER_PASSWORD.sub(r"\1***", QUERY_PASSWORD.sub(r"\1***", url))
