"""How many drafted tokens are worth verifying: as many as raise the rate of tokens per second.

A token kept to be verified is one more row in the target's pass. It pays if
`P(it and all before it are accepted) > rate * marginal seconds`, the rate being what is attained
in the long run: that is the condition of the best ratio of expected tokens to expected time. All
sequences of a batch share a pass, so their tokens compete in one list. Zero is a possible answer.
Where only some sequences count, because the others will be done before them, fewer tokens shorten
the time as much: each is worth more.
"""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.runtime.verification import Draft, Guess
from quantkit.speculative.acceptance import Acceptance
from quantkit.speculative.step_costs import StepCosts

MEMORY = 0.98
"""Weight of the past in the running rate, per step."""
PROBE_INTERVAL = 64
"""Steps without a draft after which one token is verified although it does not pay."""
FAR = 0.05
"""Share of a row's price below which a token is not considered; the cheapest rows cost more."""
REST_AFTER = 16
"""Steps without a draft after which most steps of a batch are not even asked for one: asking for
eight sequences takes 2 % of a step. For one it takes nothing that matters, and teaches."""
LOOK_INTERVAL = 4
"""One step of so many is, so that a text that begins to repeat is noticed."""
STAKE = 1.0
"""Plain steps that drafting may lose on a text before it has won any."""
LOSS = 0.02
"""Share of the time of plain decoding that it may lose beyond that."""
CAUTION = 3.0
"""Times its price that a token has to be worth where more has been lost."""


class Controller:
    """Decides on drafts, and learns from what became of them; implements Judge.

    One Controller serves all generations of a model; a rate is kept for each size of batch. With
    `coarse` only numbers of rows that were measured are used. Without `timed` costs stay as they
    were given, so that what is decided can be repeated. Expectations may be wrong on a text for as
    long as it lasts: where drafting has lost more than STAKE and LOSS allow, a token must be worth
    CAUTION times its price, so that only nearly certain ones are drafted.
    """

    def __init__(
        self, costs: StepCosts, acceptance: Acceptance, coarse: bool = False, timed: bool = True
    ) -> None:
        self.costs = costs
        self.acceptance = acceptance
        self._coarse = coarse
        self._timed = timed
        self._batch = 1
        self._behind = 1  # sequences whose tokens count
        self._rates: dict[int, tuple[float, float]] = {}  # decayed tokens and seconds
        self._idle = 0  # steps since anything was drafted
        self._idle_here = 0  # of these, on the texts at hand
        self._pass_seconds: float | None = None
        self._passes = 0  # in the step at hand
        self._won = 0.0  # seconds, on the texts at hand
        self._plain = 0.0  # seconds that its tokens would have taken without drafts
        self._asked: tuple[float, float] | None = None  # the prices, until something changes

    def begin_texts(self) -> None:
        """Say that a generation begins; what holds for its texts is not known yet."""
        self.acceptance.begin_texts()
        self._won = self._plain = 0.0
        self._idle_here = 0
        self._asked = None

    def begin_step(self, batch: int, behind: int | None = None) -> None:
        """Say how many sequences run in the next step, and for how many of these drafts count."""
        self._batch = batch
        self._behind = batch if behind is None else behind
        self._passes = 0
        self._asked = None

    @property
    def probing(self) -> bool:
        """Whether it is time to draft where it does not seem to pay."""
        return self._idle >= PROBE_INTERVAL

    @property
    def resting(self) -> bool:
        """Whether to draft nothing without asking, because nothing has paid for a while."""
        tired = self._batch > 1 and self._idle_here >= REST_AFTER
        return tired and self._idle_here % LOOK_INTERVAL != 0 and not self.probing

    def rest(self) -> None:
        """Say that nothing is drafted in the step at hand."""
        self._idle += 1
        self._idle_here += 1

    @property
    def rate(self) -> float:
        """Tokens per second attained lately, at least those of plain decoding."""
        plain = self._batch / self.costs.seconds(self._batch, self._batch)
        tokens, seconds = self._rates.get(self._batch, (0.0, 0.0))
        return max(plain, tokens / seconds) if seconds else plain

    @property
    def affordable(self) -> bool:
        """Whether drafting has not lost more on the texts at hand than it may."""
        stake = STAKE * self.costs.seconds(self._batch, self._batch)
        return self._won + stake + LOSS * self._plain >= 0

    def _price(self) -> float:
        """Return the tokens that a second has to bring."""
        batch, behind = self._batch, self._behind
        fewer = behind / batch * self.costs.seconds(batch, batch) / self._last_step()
        return fewer * self.rate * (1.0 if self.affordable else CAUTION)

    def _last_step(self) -> float:
        """Return the seconds of a step that is saved: one in which only those behind still run."""
        step = self.costs.seconds(self._batch, self._batch)
        freed = (self._batch - self._behind) * self._row_seconds()
        return max(step - freed, self._behind / self._batch * step)

    def _prices(self) -> tuple[float, float]:
        """Return the tokens that a row for each sequence and a drafting pass have to bring.

        They are asked for after every drafted token, and change with the step.
        """
        if self._asked is None:
            price = self._price()
            self._asked = price * self._row_seconds(), price * self._pass()
        return self._asked

    def chance(self, guess: Guess, place: int) -> float:
        """Return P(a guess is accepted) if all before it are; see Judge."""
        return self.acceptance.rate(guess, place)

    def pays(self, source: str, place: int, survival: float, num_drafts: int) -> bool:
        """Return whether another pass of `source` pays for a draft; see Judge."""
        if self.probing and place == 0:
            return True
        row, each_pass = self._prices()
        return survival * self.acceptance.prospect(source, place) > row + each_pass / num_drafts

    def value(self, guesses: Sequence[Guess]) -> float:
        """Return the expected gain in tokens of verifying a draft; see Judge."""
        price, _ = self._prices()
        best = total = 0.0
        for survival in self.acceptance.survivals(guesses, FAR * price):
            total += survival - price
            best = max(best, total)
        return best

    def prospect(self, source: str, limit: int, num_drafts: int) -> float:
        """Return the expected gain in tokens of a draft that is yet to be made; see Judge."""
        row, each_pass = self._prices()
        price = row + each_pass / num_drafts
        best = total = 0.0
        survival = 1.0
        for place in range(limit):
            survival *= self.acceptance.prospect(source, place)
            if survival < FAR * price:
                break
            total += survival - price
            best = max(best, total)
        return best

    def trim(self, drafts: Sequence[Draft]) -> list[Draft]:
        """Keep of each draft what pays, the whole batch considered."""
        least = FAR * self._prices()[0]
        slots = sorted(
            (-survival, place, index)
            for index, draft in enumerate(drafts)
            for place, survival in enumerate(self.acceptance.survivals(draft.guesses, least))
        )
        count = self._best_count([-survival for survival, _, _ in slots])
        if count == 0 and slots and self.probing:
            count = 1
        if count:
            self._idle = self._idle_here = 0
        else:
            self.rest()
        lengths = [0] * len(drafts)
        for _, _, index in slots[:count]:
            lengths[index] += 1
        return [draft.first(length) for draft, length in zip(drafts, lengths, strict=True)]

    def observe_step(
        self,
        tokens: int,
        rows: int,
        draft_seconds: float,
        seconds: float,
        tokens_behind: int | None = None,
    ) -> None:
        """Learn what a step brought and took: `seconds` for the target, before it for drafting.

        `tokens_behind` are those of the sequences that count; all if not given.
        """
        if self._timed:
            self.costs.observe(self._batch, rows, seconds)
        else:
            draft_seconds = self._passes * self._pass()
            seconds = self.costs.seconds(self._batch, rows)
        self._asked = None
        self._settle(tokens if tokens_behind is None else tokens_behind, rows, draft_seconds)
        old_tokens, old_seconds = self._rates.get(self._batch, (0.0, 0.0))
        self._rates[self._batch] = (
            MEMORY * old_tokens + tokens,
            MEMORY * old_seconds + draft_seconds + seconds,
        )

    def _settle(self, tokens: int, rows: int, draft_seconds: float) -> None:
        """Book what a step's drafts won and cost, rows at their expected price."""
        step, last = self.costs.seconds(self._batch, self._batch), self._last_step()
        cost = draft_seconds + self.costs.seconds(self._batch, rows) - step
        gained = tokens / self._behind - 1
        self._won += gained * last - cost
        self._plain += step + gained * last

    def observe_passes(self, passes: int, seconds: float, steady: bool = True) -> None:
        """Learn what the passes of a drafting model took.

        Those of a step that is not `steady` also read what was committed since the model last ran,
        a prompt perhaps. That is paid once, and says nothing about the passes that follow.
        """
        self._passes = passes
        if not (self._timed and steady):
            return
        each = seconds / passes
        old = each if self._pass_seconds is None else self._pass_seconds
        self._pass_seconds = 0.9 * old + 0.1 * min(each, 2 * old)
        self._asked = None

    def _pass(self) -> float:
        """Return the seconds of a drafting pass; before the first, a tenth of a step's."""
        if self._pass_seconds is None:
            return 0.1 * self.costs.seconds(self._batch, self._batch)
        return self._pass_seconds

    def _row_seconds(self) -> float:
        """Return the cost of one more row for each sequence, divided among them."""
        batch = self._batch
        more = self.costs.seconds(batch, 2 * batch) - self.costs.seconds(batch, batch)
        return more / batch

    def _best_count(self, survivals: Sequence[float]) -> int:
        """Return how many tokens, the likeliest first, give the largest expected gain.

        All counts are compared, because the cost of rows grows in steps and not evenly.
        """
        batch, rate = self._batch, self._price()
        plain = self.costs.seconds(batch, batch)
        allowed = set(self.costs.measured_rows(batch)) if self._coarse else None
        best, best_gain, expected = 0, 0.0, 0.0
        for count, survival in enumerate(survivals, start=1):
            expected += survival
            if allowed is not None and batch + count not in allowed:
                continue
            gain = expected - rate * (self.costs.seconds(batch, batch + count) - plain)
            if gain > best_gain:
                best, best_gain = count, gain
        return best
