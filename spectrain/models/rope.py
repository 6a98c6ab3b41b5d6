"""Rotary embeddings: the forms that transformers' configurations have, and the ones that a
drafter's layers use.

A drafter's layers are Llama's or Qwen3's. Training, decoding, every export and every reader take
their rotary embedding from here, as one `rope_parameters`, so that what is trained is what is
exported. Engines build the layers from the drafter's own config.json, and agree with each other
about the plain forms only:

* Llama's class in transformers ignores `partial_rotary_factor` in the default form and fails on it
  in scaled ones; vLLM and SGLang rotate that part of a head; llama.cpp has a key of its own. A
  drafter's layers are trained from scratch, so they need not rotate as little as the target's: they
  rotate whole heads, and the key is left out.
* `mrope_section` and `mrope_interleaved` split a head among three positions, which are equal on
  text. They are left out, too.
* The factors of longrope belong to frequencies, one for each pair of rotated dimensions. For whole
  heads they are interpolated over the frequencies. transformers changes from the short to the long
  ones at a length, vLLM at the start by the served length. A drafter is trained below that length,
  so both lists hold the short factors. If all are 1, the form is default.
* Dynamic scaling differs from the default form only beyond the length up to which a drafter is
  trained, and vLLM and SGLang apply it everywhere, so a drafter has the default form.
* A proportional embedding is Gemma's; no engine's Llama has it, so a drafter has the default form,
  or linear with its factor.

A drafter that other projects trained keeps the form that its files name, apart from the keys that
Llama's layer ignores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spectrain.errors import UserError, suggest_nearest

DEFAULT_THETA = 10000.0
# Largest number of any key; bases of long contexts have ten digits.
MAX_NUMBER = 1e15
BOUNDS = {"rope_theta": (1, "above 1"), "factor": (math.nextafter(1, 0), "of 1 or more")}
"""Key -> what its number is above, and in words; of any other it is 0. A base lets frequencies
fall, and a factor makes texts longer.
"""
ORIGINAL_LENGTH = "original_max_position_embeddings"
FACTOR_LISTS = ("short_factor", "long_factor")
PARTIAL = "partial_rotary_factor"


class RopeError(UserError):
    """A rotary embedding that cannot be read."""


@dataclass(frozen=True)
class RopeForm:
    """The keys of a form besides `rope_type` and `rope_theta`."""

    required: tuple[str, ...] = ()
    # Optional key -> the value that a missing one stands for, which is left out.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    has_original_length: bool = False


FORMS = {
    "default": RopeForm(),
    "linear": RopeForm(("factor",)),
    "dynamic": RopeForm(("factor",)),
    "yarn": RopeForm(
        ("factor",),
        {
            "attention_factor": None,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0,
            "mscale_all_dim": 0,
            "truncate": True,
        },
        has_original_length=True,
    ),
    "llama3": RopeForm(("factor", "low_freq_factor", "high_freq_factor"), has_original_length=True),
    "longrope": RopeForm(
        FACTOR_LISTS, {"factor": None, "attention_factor": None}, has_original_length=True
    ),
    "proportional": RopeForm((), {"factor": 1.0, PARTIAL: 1.0}),
}
"""Value of `rope_type` -> its keys."""


def _spell_plainly(key: str) -> str:
    return key.lower().replace("_", "").replace("-", "")


KEYS = {
    "rope_type", "type", "rope_theta", ORIGINAL_LENGTH, PARTIAL,
    *(key for form in FORMS.values() for key in (*form.required, *form.defaults)),
}  # fmt: skip
SPELLINGS = {_spell_plainly(key): key for key in KEYS}
"""A key without its underscores -> the key, because no reader knows another spelling."""


def read_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration's rotary embedding as one `rope_parameters`, whichever schema it has;
    raise RopeError.

    Keys that equal the form's defaults and keys that it lacks are left out, so that equal
    embeddings are equal. A partial factor is kept.
    """
    given = _select_group(config)
    kind = _form_name(given)
    if not isinstance(kind, str) or kind not in FORMS:
        raise RopeError(
            f"rope_type={kind}: there is no such rotary embedding; "
            f"{suggest_nearest(str(kind), (*FORMS, 'mrope'))}"
        )
    form = FORMS[kind]
    theta = given.get("rope_theta")
    theta = config.get("rope_theta") if theta is None else theta
    rope = {
        "rope_type": kind,
        "rope_theta": _check_number(kind, "rope_theta", DEFAULT_THETA if theta is None else theta),
    }
    for key in form.required:
        if given.get(key) is None:
            raise RopeError(
                f"rope_type={kind}: {key} is missing; write it as the model was trained with it"
            )
        rope[key] = _check_value(kind, key, given[key])
    for key, default in form.defaults.items():
        if given.get(key) is not None and not _is_same(given[key], default):
            rope[key] = _check_value(kind, key, given[key])
    if form.has_original_length:
        rope[ORIGINAL_LENGTH] = _find_original_length(kind, given, config)
    partial = given.get(PARTIAL, config.get(PARTIAL))
    if partial is not None and not _is_same(partial, 1):
        rope[PARTIAL] = _check_number(kind, PARTIAL, partial)
        if partial > 1:
            raise RopeError(f"rope_type={kind}: {PARTIAL}={partial} must be 1 or less")
    return _drop_unused(rope)


def check_rope(config: Mapping[str, Any]) -> None:
    """Raise RopeError where the rotary embedding of a config.json has a value that no model has,
    or where two of its keys contradict each other, of which every reader would take another one.

    transformers only warns of such values. Forms that it alone knows are left to it.
    """
    given = _select_group(config)
    for key in given:
        meant = SPELLINGS.get(_spell_plainly(key))
        if meant is not None and key not in KEYS:
            raise RopeError(f"{key}: no reader has a key of this spelling; write {meant}")
    _check_agreement("rope_type", given.get("rope_type"), "type", given.get("type"))
    parameters = config.get("rope_parameters") or {}
    # Of embeddings for each kind of layer, each has a base of its own.
    if parameters and not any(isinstance(value, Mapping) for value in parameters.values()):
        _check_agreement(
            "rope_theta", config.get("rope_theta"),
            "rope_parameters.rope_theta", given.get("rope_theta"),
        )  # fmt: skip
    kind = _form_name(given)
    if isinstance(kind, str) and kind not in FORMS:
        return
    rope = read_rope(config)
    if config.get("rope_parameters") and config.get("rope_scaling"):
        old = read_rope({key: config[key] for key in config if key != "rope_parameters"})
        if old != rope:
            raise RopeError(
                "rope_scaling and rope_parameters contradict each other; leave one of them out"
            )


def _check_agreement(first: str, value: Any, second: str, other: Any) -> None:
    """Raise RopeError where two keys of one meaning have different values; null says nothing."""
    if None not in (value, other) and value != other and "mrope" not in (value, other):
        raise RopeError(
            f"{first}={value} and {second}={other} contradict each other; leave one of them out"
        )


def _form_name(given: Mapping[str, Any]) -> Any:
    """Return the name of the form of a group, in either schema."""
    kind = next(
        (given[key] for key in ("rope_type", "type") if given.get(key) is not None), "default"
    )
    return "default" if kind == "mrope" else kind


def _select_group(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of one rotary embedding; of a model with one for each kind of layer,
    that of full attention.
    """
    given: Mapping[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        group = config.get(key)
        if group is not None and not isinstance(group, Mapping):
            raise RopeError(
                f"{key}={group}: it is no group of settings; write {{rope_type: default, "
                f"rope_theta: 10000.0}}"
            )
        given = group or given
    by_kind = {kind: group for kind, group in given.items() if isinstance(group, Mapping)}
    if not by_kind:
        return dict(given)
    return dict(by_kind.get("full_attention") or next(iter(by_kind.values())))


def _find_original_length(kind: str, given: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    """Return the length that the model was trained for before its rotary embedding was scaled."""
    lengths = (
        given.get(ORIGINAL_LENGTH),
        config.get(ORIGINAL_LENGTH),
        config.get("max_position_embeddings"),
    )
    length = next((length for length in lengths if length is not None), None)
    if length is None:
        raise RopeError(
            f"rope_type={kind}: {ORIGINAL_LENGTH} is missing; write it as the model was trained "
            "with it"
        )
    if _check_number(kind, ORIGINAL_LENGTH, length) < 2:
        raise RopeError(
            f"rope_type={kind}: {ORIGINAL_LENGTH}={length} must be a number of tokens above 1"
        )
    return length


def _check_value(kind: str, key: str, value: Any) -> Any:
    """Return a value of the type that its key has."""
    if key == "truncate":
        if not isinstance(value, bool):
            raise RopeError(f"rope_type={kind}: {key}={value!r} must be true or false")
        return value
    if key not in FACTOR_LISTS:
        return _check_number(kind, key, value)
    if not isinstance(value, (list, tuple)) or not value:
        raise RopeError(f"rope_type={kind}: {key}={value!r} must be a list of numbers")
    return [_check_number(kind, key, number) for number in value]


def _check_number(kind: str, key: str, value: Any) -> Any:
    """Return a number within the bounds of its key."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    least, bound = BOUNDS.get(key, (0, "above 0"))
    if not is_number or not least < value <= MAX_NUMBER:
        raise RopeError(
            f"rope_type={kind}: {key}={value!r} must be a number {bound}, and no larger "
            f"than {MAX_NUMBER:g}"
        )
    return value


def _is_same(value: Any, default: Any) -> bool:
    """Tell whether a value is the default; true is no 1."""
    return value == default and isinstance(value, bool) == isinstance(default, bool)


def _drop_unused(rope: dict[str, Any]) -> dict[str, Any]:
    """Leave out keys of yarn that change nothing; raise RopeError for ranges and lists that
    contradict each other.
    """
    if rope["rope_type"] == "llama3" and rope["high_freq_factor"] <= rope["low_freq_factor"]:
        raise RopeError(
            f"rope_type=llama3: high_freq_factor={rope['high_freq_factor']} must be above "
            f"low_freq_factor={rope['low_freq_factor']}"
        )
    if rope["rope_type"] == "longrope" and len(rope["short_factor"]) != len(rope["long_factor"]):
        raise RopeError(
            f"rope_type=longrope: short_factor has {len(rope['short_factor'])} numbers and "
            f"long_factor {len(rope['long_factor'])}; write as many of both"
        )
    if rope["rope_type"] != "yarn":
        return rope
    fast, slow = (rope.get(key, FORMS["yarn"].defaults[key]) for key in ("beta_fast", "beta_slow"))
    if fast <= slow:
        raise RopeError(f"rope_type=yarn: beta_fast={fast} must be above beta_slow={slow}")
    has_scales = "mscale" in rope and "mscale_all_dim" in rope and "attention_factor" not in rope
    return {
        key: value
        for key, value in rope.items()
        if has_scales or key not in ("mscale", "mscale_all_dim")
    }


def fit_to_head(rope: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Return a rotary embedding of `read_rope` for layers that rotate whole heads; raise
    RopeError where lists do not fit.
    """
    if rope["rope_type"] != "proportional":
        rope = {key: value for key, value in rope.items() if key != PARTIAL}
    count = len(rope.get("short_factor", ()))
    if count not in (0, head_dim // 2):
        raise RopeError(
            f"rope_type=longrope: short_factor and long_factor have {count} numbers, and a head "
            f"of {head_dim} needs {head_dim // 2}; write one for each pair of dimensions"
        )
    return rope


def drafter_rope(config: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Return the rotary embedding of a drafter's layers with heads of `head_dim` from its
    target's configuration.
    """
    rope = {key: value for key, value in read_rope(config).items() if key != PARTIAL}
    kind = rope["rope_type"]
    plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    if kind == "dynamic":
        return plain
    if kind == "proportional":
        return (
            {**plain, "rope_type": "linear", "factor": rope["factor"]}
            if "factor" in rope
            else plain
        )
    if kind != "longrope":
        return rope
    factors = interpolate_factors(rope["short_factor"], head_dim // 2)
    scale = attention_scale(rope)
    if scale == 1 and all(factor == 1 for factor in factors):
        return plain
    lists = dict.fromkeys(FACTOR_LISTS, factors)
    return {
        **plain,
        "rope_type": "longrope",
        **lists,
        ORIGINAL_LENGTH: rope[ORIGINAL_LENGTH],
        "attention_factor": scale,
    }


def interpolate_factors(factors: list[float], count: int) -> list[float]:
    """Return the factors of `count` pairs of dimensions whose frequencies span the range that those
    of `factors` span.

    Pair i of n has the frequency theta^(-i/n), so pair j of a whole head lies at j * n / count
    among the given ones. Beyond the last of these the last factor holds.
    """
    last = len(factors) - 1
    interpolated = []
    for number in range(count):
        exact = min(number * len(factors) / count, last)
        below = factors[int(exact)]
        above = factors[min(int(exact) + 1, last)]
        interpolated.append(below + (exact - int(exact)) * (above - below))
    return interpolated


def attention_scale(rope: Mapping[str, Any]) -> float:
    """Return the factor of cosines and sines of longrope for a drafter, whose length is the
    original one.
    """
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    factor = rope.get("factor") or 1.0
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(rope[ORIGINAL_LENGTH]))


def depends_on_length(rope: Mapping[str, Any]) -> bool:
    """Return whether the angle of a position depends on the length of the text."""
    return rope["rope_type"] == "dynamic" or rope.get("short_factor") != rope.get("long_factor")
