"""`spectrain eval server=..`: from the settings of the command to the score of a running server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from spectrain.config.build import GroupSpec, to_containers
from spectrain.config.check import check_node
from spectrain.config.grouped import flatten_groups
from spectrain.config.resolve import LowerLayers, default_group
from spectrain.config.spec import RunSpec, read_run
from spectrain.errors import UserError
from spectrain.eval.pipeline import UNKNOWN_DTYPE
from spectrain.export.converter import read_drafter
from spectrain.export.targets import TargetFiles
from spectrain.files import require_writable
from spectrain.models.bundled import TINY_DIRECTORY
from spectrain.models.target import Target
from spectrain.provenance import collect_provenance
from spectrain.runs.defaults import resolve_eval_spec
from spectrain.runs.drafters import build_target_without_weights, load_drafter
from spectrain.runs.folder import find_drafter_directory, find_results_folder
from spectrain.runs.score import describe_run, load_target, write_score
from spectrain.servers.commands import EngineLaunch
from spectrain.training.metrics import track_run

from ..engines.launch import start_engine
from ..engines.serve import ServedDrafter, find_served_drafter, interrupt_on_signals
from ..engines.starters import find_starter
from ..layouts.gguf_file import read_weight_type
from ..layouts.gguf_model import has_own_file
from ..servers.base import Server
from ..servers.settings import EngineSettings
from .causes import CauseFinder
from .own_chain import OwnChain
from .score import (
    DRAFTED,
    PLAIN,
    ServedSubject,
    ServerEvaluation,
    ServerGroup,
)
from .search import Cause, CauseLister

APPLICABLE = tuple(key.name for key in fields(ServerEvaluation))
"""Keys of `eval` that a server's score reads."""
FIXED_GROUPS = {
    "tree": "the server drafts a chain of the length that it was started with",
    "acceptance": "a server is scored with greedy decoding",
    "drafter": "the server drafts with its own drafter",
}
"""Groups that a server's score takes no settings of, and why."""


def score_server(config: Mapping[str, Any]) -> dict[str, Any]:
    """Score the server that the settings of `spectrain eval` name; return the content of
    summary.json.
    """
    requested = flatten_groups(to_containers(config))
    refuse_inapplicable(requested)
    spec, folder = resolve_server_spec(requested)
    evaluation = make_evaluation(spec)
    folder = find_results_folder(folder) / "eval" / evaluation.name
    require_writable(folder, "run")
    server: Server = spec.server.build()
    with ExitStack() as stack:
        if requested.get("serve"):
            served = find_served_drafter(spec, server.name)
            groups, launched = start_servers(server, served, stack)
        else:
            groups, launched = connect_servers(server), {}
        if requested.get("run"):
            subject = describe_subject(spec, server, groups, launched)
        else:
            subject = describe_server(spec, groups)
        if subject.target is not None:
            evaluation.check_prompts(subject.target)
        elif evaluation.context is not None:
            raise UserError(
                "eval.context: name the model whose tokens are counted, as in target=hf "
                "target.model=DIR"
            )
        tracker = stack.enter_context(
            track_run(spec.tracker.build(), folder, spec.to_nodes(), "eval")
        )
        summary = write_score(folder, partial(evaluation.score, subject))
        tracker.log_evaluation(summary, evaluation.tabulate(summary), folder)
    return summary


def refuse_inapplicable(requested: Mapping[str, Any]) -> None:
    """Raise a UserError for a setting that means nothing for a server."""
    if not requested.get("server"):
        raise UserError("serve=true: say which engine to start, as in server=vllm")
    if requested.get("serve"):
        if requested.get("run") is None:
            raise UserError(
                "serve=true: say with which drafter to start the engine, as in run=runs/NAME"
            )
        for key in sorted({"url", "baseline_url"} & requested["server"].keys()):
            raise UserError(
                f"server.{key}: serve=true starts the servers itself; leave it out, or leave out "
                "serve=true"
            )
    for group, reason in FIXED_GROUPS.items():
        if requested.get(group):
            raise UserError(f"{group}: {reason}; leave it out")
    for key in requested.get("eval") or {}:
        if key not in (*APPLICABLE, "_target_"):
            raise UserError(
                f"eval.{key}: it means nothing for a server; of this group it takes "
                f"{', '.join(APPLICABLE)}"
            )


def resolve_server_spec(requested: Mapping[str, Any]) -> tuple[RunSpec, Path]:
    """Return the complete settings of a server's score, and the folder that its results belong
    to.
    """
    evaluation = dict(requested.get("eval") or {})
    name = Path(str(evaluation.get("prompts") or "heldout")).stem
    server = GroupSpec.from_node("server", requested["server"])
    evaluation.setdefault("name", f"{server.choice}-{name}")
    settings = {**requested, "eval": evaluation}
    if requested.get("run") is not None:
        return resolve_eval_spec(settings)
    if settings.pop("data", None):
        raise UserError(
            "data: a server's score reads no data; give arguments of the chat template as "
            "target.template_kwargs"
        )
    settings.pop("serve", None)
    # A server has no tree of ours to measure.
    evaluation["measured"] = False
    lower = LowerLayers({"eval": default_group("eval").node})
    spec, _ = read_run({**settings, "run": "runs"}, overrides=None, lower=lower)
    return spec, Path("runs")


def make_evaluation(spec: RunSpec) -> ServerEvaluation:
    """Construct the evaluation from those of the settings of `eval` that apply."""
    checked = check_node("eval", spec.eval.node)
    return ServerEvaluation(**{key: value for key, value in checked.items() if key in APPLICABLE})


def connect_servers(server: Server) -> list[ServerGroup]:
    """Return the running servers: the one to score and, if its settings name it, the one without
    a drafter.
    """
    group: dict[str, AbstractContextManager[Server]] = {DRAFTED: nullcontext(server)}
    url = server.settings.baseline_url
    if url is not None:
        settings = replace(server.settings, url=url, baseline_url=None)
        group[PLAIN] = nullcontext(type(server)(settings))
    return [group]


def start_servers(
    server: Server, drafter: ServedDrafter, stack: ExitStack
) -> tuple[list[ServerGroup], dict[str, Any]]:
    """Return the servers that start when they are entered, and how: the engine with the run's
    drafter and without a drafter.

    With server.baseline_port both run at the same time. The drafter's files are there until `stack`
    is closed.
    """
    folder = drafter.directory
    if not drafter.is_exported:
        folder = (
            Path(stack.enter_context(TemporaryDirectory(prefix="spectrain-serve-"))) / "drafter"
        )
        drafter.write(folder, getattr(server.settings, "python", None))
    stack.enter_context(interrupt_on_signals())
    launch = drafter.make_launch(server, folder)
    settings = cast(EngineSettings, server.settings)
    baseline = type(server)(
        replace(settings, port=settings.baseline_port or settings.port, baseline_port=None)
    )
    drafted: ServerGroup = {DRAFTED: start_server(server, launch)}
    plain: ServerGroup = {PLAIN: start_server(baseline, replace(launch, drafter=None))}
    groups: list[ServerGroup] = (
        [drafted, plain] if settings.baseline_port is None else [{**drafted, **plain}]
    )
    return groups, describe_launch(server, launch, drafter)


def describe_launch(server: Server, launch: EngineLaunch, drafter: ServedDrafter) -> dict[str, Any]:
    """Return how an engine is started, as far as speed and drafts depend on it; of what is null
    the engine decides itself.
    """
    settings = cast(EngineSettings, server.settings)
    launch = settings.complete_launch(launch)
    # A GGUF file keeps the types of the drafter's matrices; other engines convert a drafter to
    # their own type.
    matrices = [tensor.dtype for tensor in drafter.checkpoint.tensors.values() if tensor.ndim > 1]
    types = {str(dtype).removeprefix("torch.") for dtype in matrices}
    return {
        "dtype": launch.dtype,
        "weight_type": find_weight_type(server, launch.dtype, drafter.target),
        "drafter_dtype": ", ".join(sorted(types))
        if find_starter(server).target_format == "gguf"
        else launch.dtype,
        "threads": getattr(settings, "threads", None),
        "draft_tokens": None if launch.drafter is None else launch.drafter.num_tokens,
        "tree_depth": getattr(settings, "tree_depth", None),
        "branching_factor": getattr(settings, "branching_factor", None),
        "alternates": settings.baseline_port is not None,
    }


def find_weight_type(server: Server, dtype: str, target: TargetFiles) -> str:
    """Return the type in which a started engine stores the target's weights: that of its own file
    or of packed weights, or else `dtype`, in which it computes."""
    if find_starter(server).target_format == "gguf" and has_own_file(
        target, getattr(server.settings, "dtype", None)
    ):
        assert target.gguf_file is not None
        return read_weight_type(target.gguf_file)
    weights = str(getattr(server.settings, "weights", "float32"))
    return dtype if weights == "float32" else weights


@contextmanager
def start_server(server: Server, launch: EngineLaunch) -> Iterator[Server]:
    """Start an engine, and yield a client of it; it ends with the block."""
    with start_engine(server, launch) as engine:
        yield engine.server


def describe_server(spec: RunSpec, groups: list[ServerGroup]) -> ServedSubject:
    """Return a server of which no run is known; with `target=`, that model's tokenizer renders
    the prompts.
    """
    target = build_target_without_weights(spec) if spec.target else None
    if target is not None:
        require_tokenizer(target)
    setting = {
        **({} if target is None else {"chat_template": target.template.facts()}),
        **collect_provenance(),
    }
    return ServedSubject(groups, target, setting)


def require_tokenizer(target: Target) -> None:
    """Raise a UserError for a target that has no tokenizer of its own."""
    is_substitute = Path(str(target.tokenizer.name_or_path)).resolve() == TINY_DIRECTORY.resolve()
    if is_substitute and Path(target.path).resolve() != TINY_DIRECTORY.resolve():
        raise UserError(
            f"target {target.name}: it has no tokenizer, which renders prompts; leave out target"
        )


def describe_subject(
    spec: RunSpec, server: Server, groups: list[ServerGroup], launched: Mapping[str, Any]
) -> ServedSubject:
    """Return a server with the drafter of a run, with which our own chain decodes, too.

    `launched` says how it was started; it is empty where spectrain did not start it.
    """
    run = Path(str(spec.run))
    target = load_target(spec, run)
    target.pack_weights()
    drafter = load_drafter(spec, run, target)
    setting = describe_run(spec, run, target, drafter)
    drafter = drafter.to(target.device, target.dtype).eval()
    own = OwnChain(
        target,
        drafter,
        find_causes(spec, run, target),
        find_starter(server).make_builder,
        launched.get("weight_type"),
    )
    setting |= {"acceptance": {"choice": "greedy"}, "dtype": UNKNOWN_DTYPE}
    return ServedSubject(groups, target, setting, own, launched)


def find_causes(spec: RunSpec, run: Path, target: Target) -> CauseLister:
    """Return what lists the causes of a disagreement; for a drafter that no layout holds it
    lists none.
    """
    files = TargetFiles.from_settings(spec.target.node)
    directory = find_drafter_directory(run)
    try:
        checkpoint = None if directory is None else read_drafter(directory, files)
    except UserError:
        checkpoint = None
    if checkpoint is None:

        def list_none(position: int) -> Iterator[Cause]:
            yield from ()

        return list_none
    return CauseFinder(checkpoint, files, target).list_causes
