"""What a drafted run is held against: transformers' own `generate`, token by token, and its own ways of drafting."""

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from spectrain.config.choices import find_choice, find_constructor
from spectrain.data.datastore import Datastore
from spectrain.drafters.base import Drafter
from spectrain.drafters.capabilities import DrafterWithExits
from spectrain.drafters.hybrid import Merged
from spectrain.drafters.layers.copies import CopySource
from spectrain.drafters.ngram import Ngram
from spectrain.drafters.retrieval import Retrieval
from spectrain.errors import UserError
from spectrain.eval.leaks import admit
from spectrain.eval.metrics import Turn
from spectrain.eval.parts import Part, Results
from spectrain.eval.prompts import Prompt
from spectrain.eval.systems import System, describe
from spectrain.models.reference_model import generate, reference_model
from spectrain.models.target import Target
from spectrain.runs.candidate import Candidate
from spectrain.runs.shipped_drafters import find_shipped_drafter, load_shipped_drafter
from spectrain.trees import Auto, Chain, Eagle2, TreeBuilder

TRAINING_FREE = ("ngram", "lookahead", "retrieval")  # choices of `drafter`
OURS = ("own", "auto", "copies", "chain", "shipped", "untrained", *TRAINING_FREE)
BESIDE = ("own", "auto", "copies", "retrieval", "chain", "shipped", "untrained", "ngram")  # unless something else is asked for
COPYING = {"copies", "retrieval"}  # those that may copy from a store
OWN = "own"  # the store of what a run was trained on
TRANSFORMERS = ("generate", "prompt_lookup", "assistant", "early_exit")


@dataclass
class Baselines(Part):
    """What the drafter is shown beside: `names` of OURS, in this engine, and of TRANSFORMERS, in its own."""

    names: Sequence[str]
    assistant: str | None = None
    exit_layer: int | None = None
    store: str | None = None  # a folder, OWN, or none
    prompts: Sequence[Prompt] = ()  # what is scored

    def check(self, candidate: Candidate) -> None:
        if "early_exit" in self.names and self.exit_layer is None and not isinstance(candidate.drafter, DrafterWithExits):
            raise UserError("eval.baselines: early_exit needs eval.exit_layer=N")

    def systems(self, candidate: Candidate, first: System) -> list[System]:
        target, drafter, builder, rule = candidate.target, candidate.drafter, candidate.builder, candidate.rule
        own = candidate.default_builder or builder
        chain = Chain(min(3, own.depth), own.children, own.temperature, own.seed)
        plain = rule.matching_rule()  # a drafter that copies text draws nothing, so p / q has no meaning for it
        drafts = not drafter.capabilities.is_copier
        judged = "" if plain.name == rule.name else f", rule {plain.name}"
        found = []
        if "own" in self.names and candidate.default_builder is not None:
            found.append(System("own", f"the same, {describe(own)}", drafter, own, rule))
        if "auto" in self.names and goes_by_clock(target, drafter, builder):
            found.append(System("auto", f"the same, {describe(Auto())}", drafter, Auto(), rule))
        own_name = find_choice("drafter", f"{type(drafter).__module__}.{type(drafter).__qualname__}")
        others = {name for name in self.names if name in TRAINING_FREE and name != own_name}
        store = self._store(candidate) if COPYING & ({*self.names} - {*TRAINING_FREE} | others) else None
        tree = Auto() if target.sharding == "none" else Eagle2(own.depth, own.budget)
        if "copies" in self.names and drafts and not drafter.capabilities.has_no_q:
            label = f"drafter with copies, {describe(tree)}{judged}"
            found.append(System("copies", label, Merged(drafter, CopySource(store)), tree, plain))
        if "chain" in self.names and not own.is_chain and drafts:
            found.append(System("chain", "the same, chain", drafter, chain, rule))
        name = find_shipped_drafter(target) if "shipped" in self.names and candidate.make_untrained is not None else None
        if name is not None:
            found.append(System("shipped", name, load_shipped_drafter(name, target), copy.deepcopy(builder), rule))
        if "untrained" in self.names and candidate.make_untrained is not None:
            found.append(System("untrained", "untrained", candidate.make_untrained(), copy.deepcopy(builder), rule))
        if "retrieval" in others:
            alone = Retrieval(target, None if store is None else str(store.folder))
            found.append(System("retrieval", f"copies alone{judged}", alone, copy.deepcopy(tree), plain))
        if "ngram" in others:
            found.append(System("ngram", f"n-gram lookup{judged}", Ngram(target), Chain(chain.depth), plain))
        if "lookahead" in others and (lookahead := find_constructor("drafter", "lookahead")) is not None:
            found.append(System("lookahead", f"lookahead{judged}", lookahead(target), Eagle2(own.depth, own.budget), plain))
        return found

    def _store(self, candidate: Candidate) -> Datastore | None:
        """What is copied from besides the text. A run's own store that holds a scored question is left out."""
        if self.store is None:
            return None
        store = candidate.open_store() if self.store == OWN else Datastore(self.store, candidate.target.tokenizer)
        if store is None:
            return None
        try:
            admit(store, self.prompts, candidate.setting)
        except UserError as error:
            if self.store != OWN:
                raise
            print(f"copies are of the text alone: {error}")
            return None
        return store

    def report(self, results: Results) -> dict[str, Any]:
        names = [name for name in self.names if name in TRANSFORMERS]
        if not names:
            return {}
        drafter = results.candidate.drafter
        own = drafter.saved.settings.get("exit_layer")
        target, turns = results.candidate.target, results.turns["drafter"]
        return {"transformers": run_transformers(target, turns, names, self.assistant, self.exit_layer or own)}


def goes_by_clock(target: Target, drafter: Drafter, builder: TreeBuilder) -> bool:
    """Whether another tree, sized by this machine's times, can stand for a builder's: processes that share a target must draft
    the same ones, and such a tree draws nothing."""
    apart = target.sharding == "none" and not drafter.capabilities.is_copier
    return apart and builder.children == "deterministic" and builder.name != Auto.name


def run_transformers(
    target: Target, turns: Sequence[Turn], names: list[str], assistant: str | None, exit_layer: int | None
) -> dict[str, Any]:
    """Greedy decoding by `generate`, plain and with its own drafting, prompt by prompt and interleaved.

    All its numbers include prefill, and each speedup is over its plain `generate`, for that engine is another than ours.
    """
    ways: dict[str, dict[str, Any]] = {"generate": {}}
    if "prompt_lookup" in names:
        ways["prompt_lookup"] = {"prompt_lookup_num_tokens": 10}
    if "assistant" in names and assistant is not None:
        ways["assistant"] = _assistant(target, assistant)
    if "early_exit" in names and exit_layer is not None:
        if exit_layer >= target.num_layers:
            raise UserError(f"eval.exit_layer={exit_layer}: {target.name} has {target.num_layers} layers; use fewer")
        ways["early_exit"] = {"assistant_early_exit": exit_layer}
    seconds = dict.fromkeys(ways, 0.0)
    tokens, forwards, identical = dict.fromkeys(ways, 0), dict.fromkeys(ways, 0), dict.fromkeys(ways, 0)
    with reference_model(target) as model, _count_forwards(model, target.num_layers) as counted:
        for number, turn in enumerate(turns):
            outputs = {}
            for offset in range(len(ways)):
                name = list(ways)[(offset + number) % len(ways)]
                before, began = len(counted), time.perf_counter()
                limit = len(turn.autoregressive.output)
                outputs[name] = generate(model, turn.autoregressive.prompt, limit, target.stop_ids, **ways[name])
                seconds[name] += time.perf_counter() - began
                tokens[name] += len(outputs[name])
                forwards[name] += len(counted) - before
            for name in ways:
                identical[name] += outputs[name] == outputs["generate"]
    plain = tokens["generate"] / seconds["generate"]
    return {
        name: {
            "tokens_per_second": round(tokens[name] / seconds[name], 3),
            "speedup": round(tokens[name] / seconds[name] / plain, 4),
            "tokens_per_forward": round(tokens[name] / max(forwards[name], 1), 4),
            "identical": identical[name],
            "checked": len(turns),
        }
        for name in ways
    }


def _assistant(target: Target, path: str) -> dict[str, Any]:
    """What `generate` is told of an assistant: where its tokenizer is another, both, for universal assisted decoding."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=target.dtype, trust_remote_code=False, use_safetensors=True
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"eval.assistant={path}: it cannot be loaded ({reason}); give a directory or a model's name") from error
    told = {"assistant_model": model.to(target.device).eval()}
    if tokenizer.get_vocab() != target.tokenizer.get_vocab():
        told |= {"tokenizer": target.tokenizer, "assistant_tokenizer": tokenizer}
    return told


@contextmanager
def _count_forwards(model: Any, num_layers: int) -> Iterator[list[int]]:
    """Forwards of the whole model; early exit drafts with the same model while its configuration says fewer layers."""
    counted: list[int] = []

    def count(module: Any, args: Any, output: Any) -> None:
        if model.config.num_hidden_layers == num_layers:
            counted.append(1)

    handle = model.register_forward_hook(count)
    try:
        yield counted
    finally:
        handle.remove()
