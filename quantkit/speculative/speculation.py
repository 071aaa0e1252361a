"""Speculation joins a drafter, the controller and a verification for the generation loop."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence

from quantkit.errors import UnsupportedError, nearest
from quantkit.runtime.engine import Engine
from quantkit.runtime.params import ResolvedParams
from quantkit.runtime.request import Request
from quantkit.runtime.stats import DraftStats
from quantkit.runtime.verification import NO_DRAFT, Draft, Verifier, verify_coupled
from quantkit.speculative.acceptance import Acceptance
from quantkit.speculative.controller import Controller
from quantkit.speculative.drafter import Drafter, DraftSession
from quantkit.speculative.drawing import draw_coupled, draw_independent
from quantkit.speculative.pace import Pace
from quantkit.speculative.rejection import ACCEPTS, rejection_verifier
from quantkit.speculative.step_costs import StepCosts

MOST_DRAFTED = 15
"""Most tokens of one draft: with the last committed one they fill the kernels for few rows."""
VERIFICATIONS = ("coupled", *ACCEPTS)
PROMISE = 0.97
"""A speed-up below this is reported."""
ENOUGH_STEPS = 32
"""Steps that say something about the speed."""

LOGGER = logging.getLogger("quantkit")


class Speculator:
    """Speculative decoding of one target; keeps what is learned from one generation to the next.

    With a `width` every sequence runs that many rows in every step, so that a draft has at most
    `width - 1` tokens, and no decision depends on measured times. Raises UnsupportedError on an
    unknown `verification`.
    """

    def __init__(
        self,
        target: Engine,
        drafter: Drafter,
        verification: str = "coupled",
        width: int | None = None,
        costs: StepCosts | None = None,
    ) -> None:
        check_verification(verification)
        self.target = target
        self.drafter = drafter
        self.verification = verification
        self.width = width
        self._costs = costs or (StepCosts.of(target) if width is None else StepCosts.nominal())
        self._controllers: dict[bool, Controller] = {}
        self._pace = Pace()

    def start(self, params: ResolvedParams, num_sequences: int) -> Speculation:
        """Return the speculation of one generation."""
        self._costs.prepare(max(1, num_sequences))
        controller = self._controller(params.temperature > 0)
        controller.begin_texts()
        coupled = self.verification == "coupled"
        draw = draw_coupled(params) if coupled else draw_independent(params)
        return Speculation(
            controller,
            self.drafter.session(self.target, num_sequences, draw),
            verify_coupled if coupled else rejection_verifier(ACCEPTS[self.verification]),
            self.width,
            self._pace,
        )

    def forget(self) -> None:
        """Forget the texts of earlier generations; what they taught about drafting stays."""
        self.drafter.forget()

    def _controller(self, sampled: bool) -> Controller:
        """Return one for greedy decoding or for sampling, which accepts less."""
        if sampled not in self._controllers:
            # A GPU's steps are recorded once per number of rows: there had better be few of these.
            coarse = self.target.device.type == "cuda"
            controller = Controller(self._costs, Acceptance(), coarse, timed=self.width is None)
            self._controllers[sampled] = controller
        return self._controllers[sampled]


class Speculation:
    """Drafting for one generation; implements what the loop asks for."""

    def __init__(
        self,
        controller: Controller,
        session: DraftSession,
        verify: Verifier,
        width: int | None,
        pace: Pace,
    ) -> None:
        self.engine = session.engine
        self.verify = verify
        self.stats = DraftStats()
        self._controller = controller
        self._session = session
        self._width = width
        self._pace = pace
        self._behind: list[bool] = []  # of the requests that run, for whom drafts count
        self._ran = False  # the drafter's model, in the last step
        self._most_drafted = MOST_DRAFTED if width is None else width - 1

    def propose(self, running: Sequence[Request]) -> list[Draft]:
        """Return for each request a draft that pays."""
        controller, session = self._controller, self._session
        rooms = [request.room for request in running]
        # Rows of a fixed width are paid for, whoever uses them.
        fixed = self._width is not None
        self._behind = [True] * len(rooms) if fixed else self._pace.behind(rooms)
        controller.begin_step(len(running), sum(self._behind))
        if controller.resting and not fixed:
            controller.rest()
            self._ran = False
            return [NO_DRAFT] * len(running)
        # Whatever becomes of a draft, one token more is chosen and needs its place.
        limits = [
            min(room - 1, self._most_drafted) if behind else 0
            for room, behind in zip(rooms, self._behind, strict=True)
        ]
        passes, begin = session.passes, time.perf_counter()
        drafts = session.propose(running, limits, controller)
        runs = session.passes > passes
        if runs:
            seconds = time.perf_counter() - begin
            controller.observe_passes(session.passes - passes, seconds, steady=self._ran)
        self._ran = runs
        return controller.trim(drafts)

    def observe(
        self,
        running: Sequence[Request],
        drafts: Sequence[Draft],
        counts: Sequence[int],
        draft_seconds: float,
        forward_seconds: float,
    ) -> None:
        """Count, learn, and forget what has ended."""
        controller, batch = self._controller, len(running)
        rows = batch + sum(map(len, drafts))
        counted = sum(itertools.compress(counts, self._behind))
        controller.observe_step(sum(counts), rows, draft_seconds, forward_seconds, counted)
        fixed = self._width is not None
        plain = forward_seconds if fixed else controller.costs.seconds(batch, batch)
        self.stats.add_seconds(draft_seconds, forward_seconds, plain * sum(counts) / batch)
        for request, draft, count in zip(running, drafts, counts, strict=True):
            accepted = _agreeing(draft.tokens, request.ids[-count:])
            controller.acceptance.observe(draft, accepted, count)
            request.stats.drafts = own = request.stats.drafts or DraftStats()
            own.add_seconds(draft_seconds, forward_seconds, plain * count)
            for stats in (self.stats, own):
                stats.count(len(draft), accepted)
            if request.finish_reason is not None:
                self._session.finish(request)
                self._pace.observe(request.finish_reason == "length")
        if all(request.finish_reason is not None for request in running):
            self._report()

    def _report(self) -> None:
        """Say so if drafting did not pay."""
        stats = self.stats
        if stats.num_steps < ENOUGH_STEPS or stats.num_drafts == 0:
            return
        if stats.speed_up is not None and stats.speed_up < PROMISE:
            LOGGER.warning(
                "drafting did not pay: about %.2f times the speed of plain decoding, %d of %d "
                "drafted tokens were accepted; draft=None turns it off",
                stats.speed_up,
                stats.num_accepted_tokens,
                stats.num_draft_tokens,
            )


def check_verification(name: str) -> None:
    """Raise UnsupportedError unless `name` is one of VERIFICATIONS."""
    if name not in VERIFICATIONS:
        hint = nearest(name, VERIFICATIONS)
        raise UnsupportedError(
            f"verification {name!r} is not known{hint}; use {', '.join(VERIFICATIONS)}"
        )


def _agreeing(drafted: Sequence[int], committed: Sequence[int]) -> int:
    """Return how many tokens at the head of a draft were committed."""
    pairs = zip(drafted, committed, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(drafted), len(committed)))
