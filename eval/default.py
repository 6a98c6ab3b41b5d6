"""The evaluation that `eval=default` constructs: with the parts of installed packages."""

from dataclasses import dataclass
from typing import ClassVar

from spectrain.eval.baselines import TRANSFORMERS
from spectrain.eval.run import Evaluation


@dataclass
class DefaultEvaluation(Evaluation):
    """Scores drafters as the settings of `eval` say."""

    # The entry points whose settings join these; see config/parts.py.
    part_group: ClassVar[str] = "eval"

    def __post_init__(self) -> None:
        for part in self.parts:
            part.prepare(self)
        super().__post_init__()
        if any(part.leaves_out_baselines for part in self.parts):
            self.baselines = tuple(name for name in self.baselines if name in TRANSFORMERS)
        for part in self.parts:
            part.check(self)
