"""Never much slower: drafting stops while it does not pay, and is tried again later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median

from spectrain.drafters.base import Drafts
from spectrain.drafters.context import Context
from spectrain.drafters.shared.resting import Resting
from spectrain.errors import UserError
from spectrain.trees.base import Draft, Round, TreeBuilder, WrappedBuilder

MEASURED = 2  # plain rounds before the first draft
BETWEEN = 32  # drafted rounds between two plain ones that time a step again: a drafter that pays loses about 1 % to them
KEPT = 9  # of the last plain rounds the median is a step: half of them may be slowed by something else


class Guard:
    """Decides before every round whether to draft, from what drafted rounds gained and cost so far, over all prompts.

    Everything is in autoregressive steps, the time of a round without a draft, which is measured again now and then: the first
    ones may have been slow, and prompts differ in length. A drafted round gains the tokens it emits and costs its time. While
    the running mean of the last `window` rounds is not positive, decoding is autoregressive and saves up for a try: each of its
    tokens may be followed by `allowance` / 2 steps of loss, so that what is lost to tries stays below half the allowance; the
    other half covers the start of a stream that never pays: `window` rounds, or fewer that lose `window` steps.
    """

    def __init__(self, allowance: float = 0.05, window: int = 8, cost: Callable[[int], float] | None = None) -> None:
        if not 0 < allowance < 1:
            raise UserError(f"guard allowance={allowance}: use more than 0 and less than 1")
        self.allowance, self.window = allowance, window
        self.cost = cost  # of a round that runs so many nodes; without it, the seconds measured
        self.steps: deque[float] = deque(maxlen=KEPT)  # costs of the last rounds without a draft
        self.since = 0  # drafted rounds since the last one without
        self.gain = 0.0  # running mean of tokens - cost over drafted rounds
        self.loss = 0.0  # the largest loss that a try is expected to make
        self.savings = 0.0
        self.num_plain = self.num_drafted = 0
        self.fallen = False  # drafting has stopped
        self.held: tuple[float, float] | None = None  # tokens and cost of a round that asked the drafter and got nothing yet

    def drafts(self) -> bool:
        """Whether the next round drafts. The first two do not, and then one after every 32 that do: they measure a step."""
        if self.num_plain < MEASURED:
            return False
        if self.held is not None:
            return True
        return self.savings >= self.loss if self.fallen else self.since < BETWEEN

    def record(self, drafted: bool, tokens: float, cost: float, proposed: bool = True) -> None:
        """A round emitted `tokens` a sequence and cost so much, in any unit that is the same for all rounds.

        A drafter that had nothing to propose may have been getting ready, so its round is judged together with the next one.
        """
        if drafted and not proposed and self.held is None:
            self.held = (tokens, cost)
            return
        if not drafted:
            self.num_plain, self.since = self.num_plain + 1, 0
            self.steps.append(cost)
            if self.fallen:
                self.savings += self.allowance / 2 * tokens
            return
        step, rounds = median(self.steps), 1
        if self.held is not None:
            tokens, cost, rounds, self.held = tokens + self.held[0], cost + self.held[1], 2, None
        gain = tokens - cost / step
        self.num_drafted, self.since = self.num_drafted + rounds, self.since + rounds
        self.gain += (gain - self.gain) / min(self.num_drafted, self.window)
        if self.fallen:
            self.savings = min(0.0, self.savings + gain) if gain < 0 else self.savings + gain
        self.loss = max(0.0, cost / step - rounds)
        if self.gain > 0:
            self.fallen = False
        elif not self.fallen and (self.num_drafted >= self.window or -self.gain * self.num_drafted >= self.window):
            self.fallen, self.savings = True, 0.0

    def summary(self) -> dict[str, int | bool]:
        """What it did, for a report."""
        return {"drafted_rounds": self.num_drafted, "plain_rounds": self.num_plain, "fallen_back": self.fallen}


class GuardedDrafter(Resting):
    """A drafter that is asked only while its guard says so."""

    def __init__(self, drafter: Drafts, guard: Guard) -> None:
        super().__init__(drafter)
        self.guard = guard

    def draft(self, context: Context) -> Draft:
        if self.guard.drafts():
            return self.ask(context)
        self.leave_out(context)
        return Draft()


class GuardedBuilder(WrappedBuilder):
    """Tells a guard what every round cost and gave."""

    def __init__(self, builder: TreeBuilder, drafter: GuardedDrafter) -> None:
        super().__init__(builder)
        self.drafter = drafter

    def observe(self, round: Round) -> None:
        guard, is_asked = self.drafter.guard, self.drafter.is_asked
        if is_asked:
            self.builder.observe(round)
        depth, nodes = round.tree.numbers[:, :2].unbind(1)
        active = round.counts > 0
        cost = sum(round.seconds.values()) if guard.cost is None else guard.cost(int(nodes.max()))
        guard.record(is_asked, float(round.counts.sum() / active.sum()), cost, bool((depth * active).any()))
