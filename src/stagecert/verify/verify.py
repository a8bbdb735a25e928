"""`verify`: whether a network has a property. Attacks first, then bounds of rising cost.

What the search believes to be proven is no answer yet: "unsat" is said once the checker, which
reads the model with code of its own, has accepted the certificate (see `proving`).
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stagecert.compiling import compiled
from stagecert.errors import ProblemError
from stagecert.networks.bounding.bounds import RELAXATIONS, Relaxation
from stagecert.networks.bounding.search import few_sizes
from stagecert.verify import agreement, attack, resuming
from stagecert.verify.complete import Complete
from stagecert.verify.forms import FormSplitter
from stagecert.verify.ladder import Boxes, Ladder
from stagecert.verify.models import OpenModel, opened
from stagecert.verify.planes import Proven, bounds_by_planes
from stagecert.verify.proving import (
    Certified,
    NotCovered,
    OutOfTime,
    Refutation,
    Rejected,
    certify,
)
from stagecert.verify.queries import Group, groups_of
from stagecert.verify.replay import Counterexample, Replay
from stagecert.verify.sizes import check_memory
from stagecert.verify.splitting import Splitter
from stagecert.verify.verdict import Answer, CaseBounds, Verdict
from stagecert_check import joining, properties
from stagecert_check.bounds import few
from stagecert_check.checker import Checker
from stagecert_check.functions import Product, Refused

# Boxes that are bounded in one call.
BOXES = 1024
# Steps of splitting for each further attack, so that these take a tenth of the time. Counted, not
# measured: a run must not depend on how busy the machine is.
STEPS_AN_ATTACK = 6
# The same for steps by quadratic forms, which are shorter.
FORM_STEPS_AN_ATTACK = 50
# The same for steps of the search through splits of neurons, which take longer.
TREE_STEPS_AN_ATTACK = 20
# Networks with so many neurons are bounded by the checker's own passes, without compiling; then so
# many steps of the tree come before more attacks, which compile.
SMALL, FIRST_TREE_STEPS = 10_000, 30
# Where variables are multiplied, passes take minutes to compile: seconds without, up to this size.
SMALL_WITH_PRODUCTS = 60_000
# Seconds between two writings of a search that may be interrupted.
SAVE_EVERY = 30.0
# How often leaves that the checker does not confirm are opened again.
REOPENINGS = 16
# So many whole boxes are bounded like that before they are split.
FEW_BOXES = 64
# Points with a larger violation than this, in the attack's float32, are not worth a replay.
NEARLY = 1e-4
# What is said of a property that the search has decided and the checker has not.
_UNCHECKED = "Every case is refuted, but no proof is checked."


def verify(
    model,
    property,
    timeout: float | None = None,
    *,
    check: bool = True,
    seed: int = 0,
    memory: float = 1.0,
    relaxation: Relaxation = "triangle",
    progress: Callable[[str], None] | None = None,
    resume: str | Path | None = None,
) -> Verdict:
    """Decides whether a network can violate a property.

    Args:
        model: an ONNX model: a path (.onnx or .onnx.gz), bytes, an onnx.ModelProto, or an
            `OpenModel`, which is read once for many properties.
        property: a VNN-LIB property: a path, its text, or what `properties.load` returned.
        timeout: seconds. Looked at between steps: a compilation or a pass over the network that is
            under way is finished first. (The command line program also ends those.) The time of
            the check counts.
        check: say "unsat" only once the checker has accepted a certificate. Without, "unsat" rests
            on the search and the importer alone.
        seed: for the starting points of the attack.
        memory: GiB that arrays may take.
        relaxation: "envelope" also bounds whole boxes by planes above neurons, which see all that a
            neuron reads, before neurons are split; see docs/envelope.md. It changes nothing where
            inputs are split instead, or where the checker does not know the network.
        progress: called with a line of text now and then.
        resume: a file for the search. It goes on from there if the file exists; if time is up, the
            file is written, and now and then before that. Once the property is decided the file is
            removed. It is never trusted: an answer needs the same proof as without.

    Raises:
        ProblemError: bad input, or a model or property of a kind that is not supported.
    """
    work = Verification(
        model, property, timeout, check=check, seed=seed, memory=memory, relaxation=relaxation,
        progress=progress, resume=resume,
    )  # fmt: skip
    return work.run()


@dataclass
class _State:
    """What is known of one group, as it becomes known."""

    bounds: np.ndarray
    refuted: np.ndarray
    how: list[str | None]
    row: list[int | None]
    nearest: np.ndarray


class Verification:
    """A verification under way: `run` it, and ask from another thread what is known `so_far`."""

    def __init__(
        self,
        model,
        property,
        timeout: float | None = None,
        *,
        check: bool = True,
        seed: int = 0,
        memory: float = 1.0,
        relaxation: Relaxation = "triangle",
        progress: Callable[[str], None] | None = None,
        resume: str | Path | None = None,
    ):
        if relaxation not in RELAXATIONS:
            known = ", ".join(RELAXATIONS)
            raise ProblemError(f"Unknown relaxation '{relaxation}'; known are {known}.")
        if timeout is not None and not timeout > 0:
            raise ProblemError(f"timeout must be a positive number of seconds, not {timeout!r}.")
        self.begin, self._compiled = time.monotonic(), compiled()[1]
        self.deadline = None if timeout is None else self.begin + timeout
        self.check, self.memory, self.relaxation = check, memory, relaxation
        self.say = progress or (lambda _: None)
        self.draw = np.random.default_rng(seed)
        self.draw_long = np.random.default_rng([seed, 1])
        if not isinstance(property, properties.Property):
            property = properties.load(property)
        self.property = self.stated = property
        self.model = model
        self.opened: OpenModel | None = None
        self.groups: tuple[Group, ...] = ()
        self.states: list[_State] = []
        self.ready = False  # whether groups and states are there
        self.found: Counterexample | None = None
        self.splitter: Splitter | None = None
        self.complete: Complete | None = None
        self.curved: list[FormSplitter] = []  # by group, as far as they were worked on
        self.rows: dict[int, int] = {}  # by case: the row of the group that refutes it as a whole
        self.planes: dict[int, Proven] = {}  # by case: what refutes its row
        self.certified: Certified | None = None
        self.objection: str | None = None
        self.rejected = False
        self.reason = ""
        self._reopened = 0
        self.resume = None if resume is None else Path(resume)
        self._next_save = self.begin + SAVE_EVERY
        self._ended: tuple[Answer, str] = ("timeout", "Time is up.")
        self._lasting: dict[str, Any] = {}  # what of the search is worth a file, by name

    def run(self) -> Verdict:
        """Works until the property is decided, nothing is left to try, or time is up."""
        self.say("reading the model")
        model = opened(self.model, self.property)
        joining.check_names(model.several, self.property)
        self.opened, self.stated = model, _ = model.stating(self.property)
        check_memory(model.network, self.memory)
        self.network, self.groups = groups_of(model.network, self.stated)
        self.ladder = Ladder(self.network, self.memory, self._left, self.say)
        self.states = [
            _State(
                np.full(len(group.rows), -np.inf),
                np.zeros(len(group.numbers), bool),
                [None] * len(group.numbers),
                [None] * len(group.numbers),
                np.full(len(group.numbers), np.inf),
            )
            for group in self.groups
        ]
        self.ready = True
        if self.resume is not None and self.resume.exists():
            resuming.restore(self.resume, *self._digests(), {})
        if self.groups:
            self.say("comparing the network with ONNX Runtime")
            agreement.check(model, self.groups)
            logits = None if model.dropped is None else model.session
            self.replay = Replay(model.replayed, self.property, logits)
            verdict = self._decide()
        else:
            self.reason = "No input satisfies the assertions: there is nothing to verify."
            verdict = self.so_far("unknown")
        if self.check and self.found is None and self._decided():
            verdict = self._pass_the_gate(model)
        if self.resume is not None and verdict.decided:
            self.resume.unlink(missing_ok=True)
        elif not verdict.decided and self._late():
            self._save()
        return verdict

    def interrupt(self) -> None:
        """Ends the work as if time were up, from another thread."""
        self._ended = "unknown", "Interrupted."
        self.deadline = time.monotonic()

    # -- files of interrupted searches -----------------------------------------------------------

    def _save(self) -> None:
        """Writes down the search, if a file was asked for and there is a search to go on with."""
        if self.resume is not None and self._lasting:
            begin = time.monotonic()
            resuming.save(self.resume, *self._digests(), self._lasting)
            # Writing takes a twentieth of the time at most.
            spent = time.monotonic() - begin
            self._next_save = time.monotonic() + max(SAVE_EVERY, 20 * spent)

    def _save_sometimes(self) -> None:
        if time.monotonic() >= self._next_save:
            self._save()

    def _restored(self, name: str, search: Any) -> bool:
        """Whether a search goes on from the file."""
        if self.resume is None or self._lasting or not self.resume.exists():
            return False
        return name in resuming.restore(self.resume, *self._digests(), {name: search})

    def _digests(self) -> tuple[str, str]:
        """What a file must be of; without a check, nothing is kept that could be checked."""
        assert self.opened is not None
        checked = "" if self.check else " unchecked"
        without = "" if self.opened.dropped is None else f" without {self.opened.dropped}"
        return self.opened.contents.digest, self.property.digest + checked + without

    def _pass_the_gate(self, model: OpenModel) -> Verdict:
        """The answer to a property all of whose cases are refuted: what the checker says."""
        self.say("proving and checking")
        tree = self.splitter.tree if self.splitter else None
        branches = self.complete.branches() if self.complete else ()
        cuts = {n: tree for splitter in self.curved for n, tree in splitter.trees().items()}
        found = Refutation(self.network, self.groups, self.rows, tree, branches, self.planes, cuts)
        try:
            self.certified = certify(
                model, self.stated, found, memory=self.memory, progress=self.say, stop=self._late
            )
        except OutOfTime:
            return self.so_far(*self._ended)
        except NotCovered as error:
            self.objection = str(error)
            return self.so_far("unknown", f"The checker cannot follow: {error}.")
        except Rejected as error:
            if error.open and self.complete is not None and self._reopened < REOPENINGS:
                self._reopened += 1
                return self._search_further(model, error.open)
            self.objection, self.rejected = str(error), True
            return self.so_far("unknown", f"The checker rejects the proof: {error}.")
        return self.so_far()

    def _search_further(self, model: OpenModel, open_: dict[int, np.ndarray]) -> Verdict:
        """Goes on where bounds in single precision were not good enough for the checker."""
        assert self.complete is not None
        self.complete.reopen(open_)
        for g, group in enumerate(self.groups):
            for c, number in enumerate(group.numbers):
                self.states[g].refuted[c] &= number not in open_
        self._grow_tree()
        if self.found is None and self._decided() and not self._late():
            return self._pass_the_gate(model)
        return self.so_far(*self._ended) if self._late() else self.so_far()

    def so_far(self, answer: Answer | None = None, reason: str | None = None) -> Verdict:
        """What is known at this moment; `answer` stands unless the property is decided."""
        answer = answer or "unknown"
        reason = self.reason if reason is None else reason
        if self.found is not None:
            answer, reason = "sat", "ONNX Runtime confirms the counterexample."
        elif self.certified is not None or (not self.check and self.ready and self._decided()):
            answer, reason = "unsat", self.reason or "Every case is refuted."
        elif self.ready and self._decided() and not self.rejected:
            reason = f"{_UNCHECKED} {reason}"
        cases = []
        for g, (group, state) in enumerate(zip(self.groups, self.states, strict=False)):
            margins = group.margin(state.bounds)
            for c, number in enumerate(group.numbers):
                rows = group.places[c].tolist()
                best = float(np.max(margins[rows])) if rows else -np.inf
                refuted = bool(state.refuted[c])
                row = state.row[c]
                scales = {group.scaled[r].scale for r in rows}
                unit = float(scales.pop()) if len(scales) == 1 else 1.0
                cases.append(
                    CaseBounds(
                        number,
                        refuted,
                        state.how[c],
                        None if row is None else rows.index(row),
                        margins[rows],
                        self._proven(g, c, best),
                        0.0 if refuted else max(-best, 0.0),
                        float(state.nearest[c]) / unit,
                    )
                )
        cases.sort(key=lambda one: one.case)
        boxes = self.splitter.seen if self.splitter else 0
        boxes += sum(splitter.seen for splitter in self.curved)
        if self.complete is not None and self.complete.tree is not None:
            boxes += self.complete.tree.seen
        return Verdict(
            answer,
            self.found,
            tuple(cases),
            time.monotonic() - self.begin,
            reason,
            boxes,
            self.certified,
            self.objection,
            self.rejected,
            self._closed(),
            compiled()[1] - self._compiled,
            None if self.opened is None else self.opened.dropped,
        )

    def _closed(self) -> float | None:
        """The share of the tree that is closed, of boxes or of splits; None without a tree."""
        if self.splitter is not None:
            return float(self.splitter.finished / max(self.splitter.total, 1))
        if self.complete is not None and self.complete.tree is not None:
            return float(self.complete.tree.closed)
        if self.curved:
            return sum(splitter.finished for splitter in self.curved) / len(self.curved)
        return None

    def _proven(self, g: int, c: int, best: float) -> float:
        """A lower bound on the violation of a case, from the best one over its whole box."""
        if self.splitter and self.states[g].how[c] == "splitting":
            return float(self.splitter.proven[g, c])
        # Leaves that split neurons refute a combination of rows: there is no violation of zero.
        return max(best, 0.0) if self.states[g].how[c] in ("tree", "forms") else best

    # -- the order of things -------------------------------------------------------------------

    def _decide(self) -> Verdict:
        divide = Splitter.worthwhile(self.groups)
        if self.relaxation == "envelope" and divide:
            self.say("no envelopes: inputs are split instead")
        steps: list[Callable[[], None]] = [lambda: self._attack(attack.SHORT[:1])]
        if divide:
            # Whole boxes may be enough, and nothing has to be compiled for them.
            steps = [self._refute_whole_boxes, *steps, self._split_inputs]
        elif self._plantable():
            first: list[Callable[[], None]] = [
                lambda: self._bound("ibp"),
                lambda: self._bound("backward"),
            ]
            if self._small():
                first = [self._bound_by_checker, lambda: self._search_tree(FIRST_TREE_STEPS)]
            if self.relaxation == "envelope":
                first.insert(len(first) if not self._small() else 1, self._bound_by_planes)
            if self._multiplies():
                # Attacks compile for long as well: what needs none comes first.
                steps = [self._bound_roughly, *([first.pop(0)] if self._small() else []), *steps]
            steps += [*first, lambda: self._attack(attack.SHORT), self._search_tree]
        else:
            if self.relaxation == "envelope":
                self.say("no envelopes: the checker does not know all of this network")
            steps += [
                lambda: self._bound("ibp"),
                lambda: self._bound("backward"),
                lambda: self._attack(attack.SECOND),
                lambda: self._bound("nonconvex"),
                lambda: self._bound("optimised"),
                lambda: self._attack(attack.LAST),
            ]
        for step in steps:
            step()
            if self._over():
                break
        if self._late() and not self._decided():
            return self.so_far(*self._ended)
        return self.so_far("unknown", self.reason or "All methods were tried.")

    def _decided(self) -> bool:
        """Whether there is a counterexample, or the search has refuted every case."""
        return self.found is not None or all(state.refuted.all() for state in self.states)

    def _late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    def _over(self) -> bool:
        return self._decided() or self._late()

    def _left(self) -> float | None:
        return None if self.deadline is None else max(self.deadline - time.monotonic(), 0.0)

    # -- counterexamples -----------------------------------------------------------------------

    def _open(self) -> list[tuple[int, int]]:
        """Cases that are not refuted: (group, case of the group)."""
        return [
            (g, int(c))
            for g, state in enumerate(self.states)
            for c in np.flatnonzero(~state.refuted)
        ]

    def _attack(self, plans: Sequence[attack.Plan], corners: bool = True) -> None:
        """Projected gradients on all open cases, for each plan from new points.

        The first ones are the centre, corners and random points, the others random ones; all are if
        `corners` is False.
        """
        width = attack.lanes_at_once(self.network)
        for turn, plan in enumerate(plans):
            cases = self._open()
            restarts = max(width // max(len(cases), 1), 4)
            lanes = [case for case in cases for _ in range(restarts)]
            self.say(f"attacking {len(cases)} cases")
            for places, _ in attack.in_lanes(self.network, len(lanes)):
                some = [lanes[k] for k in places]
                goal = attack.targets(self.groups, some)
                # Short descents have the same starting points whether there are long ones or not.
                draw = self.draw if plan in attack.SHORT else self.draw_long
                points = self._starts(goal, some, corners and turn == 0, draw)
                found = attack.descend(self.network, points, goal, plan, draw)
                self._judge(found.points, found.violation, some)
                if self._over():
                    return

    def _starts(self, goal: attack.Targets, lanes, first: bool, draw) -> np.ndarray:
        points = np.empty_like(goal.lower)
        begin = 0
        while begin < len(lanes):
            end = begin
            while end < len(lanes) and lanes[end] == lanes[begin]:
                end += 1
            points[begin:end] = attack.start_points(
                goal.lower[begin], goal.upper[begin], end - begin, draw, first
            )
            begin = end
        return points

    def _judge(self, points, violation, lanes) -> None:
        """Notes the best violations, and replays the points that look like counterexamples."""
        order = np.argsort(np.where(np.isnan(violation), np.inf, violation))
        for k in order:
            g, c = lanes[k]
            state = self.states[g]
            state.nearest[c] = min(state.nearest[c], float(violation[k]))
        for k in order[:8]:
            if violation[k] <= NEARLY and self._confirmed(points[k], *lanes[k]):
                return

    def _confirmed(self, point, g: int, c: int) -> bool:
        assert self.opened is not None
        number, places = self.groups[g].numbers[c], self.opened.places
        self.found = self.replay.check(point if places is None else point[places], number)
        return self.found is not None

    # -- bounds over whole boxes -----------------------------------------------------------------

    def _bound(self, how: str) -> None:
        """Bounds the rows of open cases over their boxes; see `CaseBounds.how`."""
        waiting = sorted({g for g, _ in self._open()})
        for begin in range(0, len(waiting), BOXES):
            self._bound_some(how, waiting[begin : begin + BOXES])
            if self._over():
                return

    def _bound_some(self, how: str, chosen: list[int]) -> None:
        picks = [
            np.unique(
                np.concatenate(
                    [self.groups[g].places[c] for c in np.flatnonzero(~self.states[g].refuted)]
                )
            )
            for g in chosen
        ]
        if not any(map(len, picks)):
            return
        # So that fewer sizes are compiled; the first row fills up the others.
        most = few_sizes(self.ladder.parts.layers, max(map(len, picks)), len(chosen))
        picks = [np.concatenate([p, np.repeat(p[:1], most - len(p))]) for p in picks]
        self.say(f"bounding {len(chosen)} boxes x {most} rows: {how}")
        found = self.ladder.bound(how, self._asked(chosen, picks))
        if found is None:
            return
        for k, (g, pick) in enumerate(zip(chosen, picks, strict=True)):
            self._note(how, g, pick, found.bound[k])
        if not self._decided() and how != "ibp":
            self._try_minimisers(found.points, chosen)

    def _asked(self, chosen: list[int], picks: list) -> Boxes:
        """The boxes of groups, and the picked rows of each."""
        groups = [self.groups[g] for g in chosen]
        return Boxes(
            chosen,
            np.stack([group.inputs.lower64 for group in groups]).astype(float),
            np.stack([group.inputs.upper64 for group in groups]).astype(float),
            np.stack([group.matrix[p] for group, p in zip(groups, picks, strict=True)]),
            np.stack([group.limits[p] for group, p in zip(groups, picks, strict=True)]),
        )

    def _note(self, how: str, g: int, pick: np.ndarray, bounds: np.ndarray) -> None:
        """Keeps bounds of some rows of a group: each is a proof by itself."""
        group, state = self.groups[g], self.states[g]
        np.maximum.at(state.bounds, pick, np.where(np.isnan(bounds), -np.inf, bounds))
        passes = np.zeros(len(group.rows), bool)
        passes[pick] = group.passes(bounds, pick)
        for c in np.flatnonzero(~state.refuted):
            rows_that = group.places[c][passes[group.places[c]]]
            if len(rows_that):
                row = int(rows_that[np.argmax((state.bounds - group.limits)[rows_that])])
                state.how[c], state.row[c] = how, row
                state.refuted[c] = True
                self.rows[group.numbers[c]] = row

    def _try_minimisers(self, points: np.ndarray, chosen: list[int]) -> None:
        """Attacks from the points where bounds are attained: (boxes, rows, entries)."""
        every = (
            (k, g, int(c), r)
            for k, g in enumerate(chosen)
            for c in np.flatnonzero(~self.states[g].refuted)
            for r in range(points.shape[1])
        )
        # There are as many as cases times rows.
        some = list(itertools.islice(every, 4 * attack.lanes_at_once(self.network)))
        self._descend_from(
            np.array([points[k, r] for k, _, _, r in some]), [(g, c) for _, g, c, _ in some]
        )

    def _descend_from(self, starts: np.ndarray, lanes: list[tuple[int, int]]) -> None:
        for some, _ in attack.in_lanes(self.network, len(lanes)):
            chosen = [lanes[k] for k in some]
            goal = attack.targets(self.groups, chosen)
            found = attack.descend(self.network, starts[some], goal, attack.NEAR)
            self._judge(found.points, found.violation, chosen)
            if self._over():
                return

    # -- splitting ---------------------------------------------------------------------------------

    def _split_inputs(self) -> None:
        """Splits boxes; where variables are multiplied, with bounds by quadratic forms."""
        assert self.opened is not None
        try:
            checker = Checker(self.opened.program, self.stated)
        except Refused:
            self._split()
            return
        if all(
            checker.quadratics(group.numbers[0]) and all(map(len, group.places))
            for group in self.groups
        ):
            self._split_by_forms(checker)
        else:
            self._split()

    def _split_by_forms(self, checker: Checker) -> None:
        plans, number, next_descent = itertools.cycle(attack.LAST), 0, 1
        for g, (group, state) in enumerate(zip(self.groups, self.states, strict=True)):
            if state.refuted.all():
                continue
            splitter = FormSplitter(checker, group, ~state.refuted)
            self.curved.append(splitter)
            while len(splitter.stack):
                splitter.step()
                number += 1
                if number == next_descent:
                    next_descent *= 3
                    lanes = [(g, int(c)) for c in splitter.lanes]
                    most = attack.lanes_at_once(self.network)
                    self._descend_from(splitter.points[:most], lanes[:most])
                    if not self._over():
                        some = itertools.islice(plans, number // FORM_STEPS_AN_ATTACK)
                        self._attack(tuple(some), corners=False)
                self.say(
                    f"splitting by quadratic forms: {splitter.seen} boxes, "
                    f"{len(splitter.stack)} waiting, {100 * splitter.finished:.4g} % decided"
                )
                if splitter.stuck:
                    self.reason = "A box became too small to split."
                    return
                if self._over():
                    return
            for c in np.flatnonzero(~state.refuted):
                state.how[c], state.refuted[c] = "forms", True

    def _split(self) -> None:
        open_cases = [~state.refuted for state in self.states]
        self.splitter = splitter = Splitter(
            self.network, self.groups, open_cases, keep=self.check, memory=self.memory
        )
        self._restored("splitter", splitter)
        self._lasting = {"splitter": splitter}
        number, next_descent = 0, 1
        plans = itertools.cycle(attack.LAST)
        while len(splitter.stack):
            step = splitter.step(self._late)
            if step.points is None:
                return
            for g, bounds in step.roots or ():
                known = self.states[g].bounds
                np.fmax(known, bounds[: len(known)], out=known)
            if step.stuck:
                self.reason = "A box became too small to split."
                return
            if len(splitter.stack) > splitter.most:
                self.reason = "The boxes that are left do not fit into the memory allowed."
                return
            number += 1
            self._watch(step, descend=number == next_descent)
            if number == next_descent:
                next_descent *= 3
                if not self._over():
                    some = itertools.islice(plans, number // STEPS_AN_ATTACK)
                    self._attack(tuple(some), corners=False)
            self.say(
                f"splitting: {splitter.seen} boxes, {len(splitter.stack)} waiting, "
                f"{100 * splitter.finished / splitter.total:.4g} % decided"
            )
            self._save_sometimes()
            if self._over():
                return
        for state in self.states:
            for c in np.flatnonzero(~state.refuted):
                state.how[c] = "splitting"
            state.refuted[:] = True

    # -- splits of neurons -------------------------------------------------------------------------

    def _plantable(self) -> bool:
        """Whether there can be a tree: the checker understands the model, and rows have limits."""
        assert self.opened is not None
        try:
            checker = Checker(self.opened.program, self.stated)
        except Refused:
            return False
        self.complete = Complete(checker, self.groups, memory=self.memory, keep=self.check)
        return True

    def _small(self) -> bool:
        assert self.complete is not None
        most = SMALL_WITH_PRODUCTS if self._multiplies() else SMALL
        return self.complete.form.neurons <= most

    def _multiplies(self) -> bool:
        """Whether the network has products of variables."""
        assert self.complete is not None
        nodes, activations = self.complete.program.nodes, self.complete.checker.activations
        return any(isinstance(nodes[k].operation, Product) for k in activations)

    def _bound_by_checker(self) -> None:
        """Bounds over whole boxes as the checker derives them: nothing has to be compiled."""
        assert self.complete is not None
        for g in sorted({g for g, _ in self._open()}):
            self.say(f"bounding box {g + 1} of {len(self.groups)}: backward")
            try:
                bounds = self.complete.whole(g).bounds
            except Refused:
                continue
            self._note("backward", g, np.arange(len(bounds)), bounds)
            if self._over():
                return

    def _bound_roughly(self) -> None:
        """The same with fewer passes back, which is where nearly all of the time goes."""
        assert self.complete is not None
        for passes in (False, few):
            for g in sorted({g for g, _ in self._open()}):
                self.say(f"bounding box {g + 1} of {len(self.groups)}: intervals")
                try:
                    bounds = self.complete.rough(g, passes)
                except Refused:
                    continue
                self._note("backward", g, np.arange(len(bounds)), bounds)
                if self._over():
                    return

    def _bound_by_planes(self) -> None:
        """Bounds over whole boxes that look at all inputs of neurons."""
        assert self.complete is not None
        for g in sorted({g for g, _ in self._open()}):
            self.say(f"bounding box {g + 1} of {len(self.groups)}: envelopes")
            group, state = self.groups[g], self.states[g]
            open_ = np.flatnonzero(~state.refuted)
            places = np.unique(np.concatenate([group.places[c] for c in open_]))
            places = places[np.isfinite(group.limits[places])]
            try:
                proven = bounds_by_planes(self.complete.program, group, places, self.memory)
            except Refused:
                continue
            bounds = np.array([one.bound for one in proven.values()])
            self._note("envelope", g, np.array(list(proven), int), bounds)
            for c in open_:
                row = state.row[c]
                if state.refuted[c] and row in proven:
                    self.planes[group.numbers[c]] = proven[row]
            if self._over():
                return

    def _refute_whole_boxes(self) -> None:
        """Refutes all cases over whole boxes as the checker does, or leaves everything as it is.

        Splitting boxes compiles for seconds, which is too long for what needs no splits.
        """
        bounds = []
        if len(self.groups) <= FEW_BOXES and self._plantable() and self._small():
            assert self.complete is not None
            for g, group in enumerate(self.groups):
                try:
                    bounds.append(self.complete.whole(g).bounds)
                except Refused:
                    break
                passes = group.passes(bounds[-1])
                if self._late() or not all(passes[rows].any() for rows in group.places):
                    bounds.pop()
                    break
        if len(bounds) == len(self.groups):
            for g, found in enumerate(bounds):
                self._note("backward", g, np.arange(len(found)), found)
        else:
            self.complete = None

    def _search_tree(self, steps: int | None = None) -> None:
        """Refutes the open cases on a tree of splits of neurons, for so many steps at first.

        What these leave open is searched anew on tighter intervals, until time is up.
        """
        assert self.complete is not None
        self.say("intervals for splits of neurons")
        open_ = [~state.refuted for state in self.states]
        try:
            if self._goes_on(open_):
                self._grow_tree()
                return
            if steps is None and not self.complete.tighten(open_, self._late):
                return
            planted = self.complete.plant(open_, self._late)
        except Refused:
            return
        if planted:
            self._grow_tree(steps)

    def _goes_on(self, open_: list[np.ndarray]) -> bool:
        """Whether the tree is that of a file, which has all cases that are open."""
        assert self.complete is not None
        if not self._restored("complete", self.complete):
            return False
        tree = self.complete.adopted(self._late)
        roots = {(root.group, root.case) for root in tree.roots}
        wanted = {(g, int(c)) for g, some in enumerate(open_) for c in np.flatnonzero(some)}
        if not wanted <= roots:
            raise ProblemError(f"{self.resume} lacks cases of the property. Remove it.")
        return True

    def _grow_tree(self, steps: int | None = None) -> None:
        assert self.complete is not None
        tree = self.complete.tree
        assert tree is not None
        begin, before = time.monotonic(), tree.seen
        # The first steps on loose intervals are not worth a file.
        self._lasting = {} if steps is not None else {"complete": self.complete}
        number, next_descent = 0, 1
        plans = itertools.cycle(attack.LAST)
        while not tree.done and number != steps:
            met = tree.step()
            number += 1
            lanes = [(tree.roots[k].group, tree.roots[k].case) for k in met.roots]
            if number == next_descent and lanes:
                next_descent *= 3
                most = attack.lanes_at_once(self.network)
                worst = np.argsort(met.bounds, kind="stable")[:most]
                self._descend_from(met.points[worst], [lanes[k] for k in worst])
                if not self._over():
                    some = itertools.islice(plans, number // TREE_STEPS_AN_ATTACK)
                    self._attack(tuple(some), corners=False)
            self.say(
                f"splits of neurons: {tree.seen} nodes, "
                f"{(tree.seen - before) / max(time.monotonic() - begin, 1e-9):.3g} a second, "
                f"{len(tree.stack)} waiting, worst bound {tree.worst:.3g}, "
                f"{100 * tree.closed:.4g} % refuted"
            )
            self._save_sometimes()
            if tree.stuck:
                self._descend_from(met.points, lanes)
                self.reason = "A part of the tree can neither be split nor refuted."
            if self._over() or tree.stuck:
                return
        for root in tree.roots if tree.done else ():
            state = self.states[root.group]
            state.how[root.case], state.refuted[root.case] = "tree", True

    def _watch(self, step, descend: bool) -> None:
        """Looks at the points that the splitter met, and sometimes goes on from the best."""
        assert step.points is not None
        assert step.violation is not None
        assert step.group is not None
        assert step.open is not None
        worth = np.where(step.open[:, None], step.violation, np.inf)
        worth = np.where(np.isnan(worth), np.inf, worth)
        flat = worth.reshape(-1)
        some = min(attack.lanes_at_once(self.network) if descend else 8, flat.size)
        best = np.argpartition(flat, some - 1)[:some]
        best = best[np.argsort(flat[best], kind="stable")]
        best = best[np.isfinite(flat[best])]
        if not len(best):
            return
        b, p, c = np.unravel_index(best, worth.shape)
        lanes = [(int(step.group[i]), int(k)) for i, k in zip(b, c, strict=True)]
        starts = step.points[b, p]
        self._judge(starts, worth[b, p, c], lanes)
        if descend and not self._over():
            self._descend_from(starts, lanes)
