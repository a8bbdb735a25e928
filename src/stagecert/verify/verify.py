"""`verify`: whether a network has a property. Attacks first, then bounds of rising cost.

What the search believes to be proven is no answer yet: "unsat" is said once the checker, which
reads the model with code of its own, has accepted the certificate (see `proving`).
"""

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from stagecert.compiling import compiled
from stagecert.errors import ProblemError
from stagecert.machine import cores
from stagecert.networks.bounding.bounds import RELAXATIONS, Relaxation
from stagecert.verify import agreement, attack, resuming
from stagecert.verify.attack import Attacker
from stagecert.verify.complete import Complete
from stagecert.verify.findings import Findings
from stagecert.verify.forms import FormSplitter
from stagecert.verify.ladder import Ladder, WholeBoxes
from stagecert.verify.models import OpenModel, check_memory, opened
from stagecert.verify.proving import (
    Certified,
    NotCovered,
    OutOfTime,
    Refutation,
    Rejected,
    certify,
)
from stagecert.verify.queries import groups_of
from stagecert.verify.replay import Replay
from stagecert.verify.splitting import Splitter
from stagecert.verify.team import MOST, Team, one_thread
from stagecert.verify.verdict import Answer, Verdict
from stagecert_check import joining, properties
from stagecert_check.checker import Checker
from stagecert_check.functions import Product, Refused

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
SMALL_WITH_PRODUCTS = 250_000
# Seconds between two writings of a search that may be interrupted.
SAVE_EVERY = 30.0
# How often leaves that the checker does not confirm are opened again.
REOPENINGS = 16
# So many whole boxes are bounded like that before they are split.
FEW_BOXES = 64
# Why boxes are left open.
TOO_SMALL = "A box became too small to split."
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
    processes: int | None = 1,
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
        processes: how many share the search through splits of neurons, this one included; the
            others join once it has taken a second. None means one for each core, up to 8. With
            more than one, the tree that is found depends on how fast they are.

    Raises:
        ProblemError: bad input, or a model or property of a kind that is not supported.
    """
    work = Verification(
        model, property, timeout, check=check, seed=seed, memory=memory, relaxation=relaxation,
        progress=progress, resume=resume, processes=processes,
    )  # fmt: skip
    return work.run()


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
        processes: int | None = 1,
    ):
        if relaxation not in RELAXATIONS:
            known = ", ".join(RELAXATIONS)
            raise ProblemError(f"Unknown relaxation '{relaxation}'; known are {known}.")
        if timeout is not None and not timeout > 0:
            raise ProblemError(f"timeout must be a positive number of seconds, not {timeout!r}.")
        if processes is not None and processes < 1:
            raise ProblemError(f"processes must be at least 1, not {processes}.")
        self.team = Team(min(cores(), MOST) if processes is None else processes)
        self.begin, self._compiled = time.monotonic(), compiled()[1]
        self.deadline = None if timeout is None else self.begin + timeout
        self.check, self.memory, self.relaxation = check, memory, relaxation
        self.say = progress or (lambda _: None)
        self.seed = seed
        if not isinstance(property, properties.Property):
            property = properties.load(property)
        self.property = self.stated = property
        self.model = model
        self.opened: OpenModel | None = None
        self.known = Findings()
        self.ready = False  # whether the cases are known
        self.splitter: Splitter | None = None
        self.complete: Complete | None = None
        self.curved: list[FormSplitter] = []  # by group, as far as they were worked on
        self.checker: Checker | None = None  # what it has derived for the search, it need not again
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
        with one_thread(), self.team:
            return self._run()

    def _run(self) -> Verdict:
        self.say("reading the model")
        model = opened(self.model, self.property)
        joining.check_names(model.several, self.property)
        self.opened, self.stated = model, _ = model.stating(self.property)
        check_memory(model.network, self.memory)
        self.network, groups = groups_of(model.network, self.stated)
        self.known = Findings(groups)
        self.ladder = Ladder(self.network, self.memory, self._left, self.say)
        self.ready = True
        if self.resume is not None and self.resume.exists():
            resuming.restore(self.resume, *self._digests(), {})
        if self.known.groups:
            self.say("comparing the network with ONNX Runtime")
            agreement.check(model, self.known.groups)
            logits = None if model.dropped is None else model.session
            replay = Replay(model.replayed, self.property, logits)
            self.attacker = Attacker(
                self.network, self.known, replay, self._over, self.say, self.seed, model.places
            )
            self.whole = WholeBoxes(self.known, self.ladder, self.attacker, self._over, self.say)
            verdict = self._decide()
        else:
            self.reason = "No input satisfies the assertions: there is nothing to verify."
            verdict = self.so_far("unknown")
        if self.check and self.known.found is None and self.known.decided():
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
            if self.complete is not None:
                self.complete.gather(0.0 if self._late() else SAVE_EVERY)
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
        found = Refutation(
            self.network,
            self.known.groups,
            self.known.rows,
            tree,
            branches,
            self.known.planes,
            cuts,
            self.checker,
            self.complete.accepted() if self.complete else {},
            self.team,
        )
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
            if self._reopened < REOPENINGS and (error.open or error.boxes):
                self._reopened += 1
                return self._search_further(model, error)
            self.objection, self.rejected = str(error), True
            return self.so_far("unknown", f"The checker rejects the proof: {error}.")
        return self.so_far()

    def _search_further(self, model: OpenModel, error: Rejected) -> Verdict:
        """Goes on where bounds in single precision were not good enough for the checker."""
        if error.boxes:
            assert self.splitter is not None
            assert self.splitter.tree is not None
            for node, c in error.boxes:
                self.known.states[self.splitter.tree.group[node]].refuted[c] = False
            if self.splitter.reopen(error.boxes):
                self._cut_boxes()
            else:
                self.reason = TOO_SMALL
        else:
            assert self.complete is not None
            self.complete.reopen(error.open)
            for g, group in enumerate(self.known.groups):
                for c, number in enumerate(group.numbers):
                    self.known.states[g].refuted[c] &= number not in error.open
            self._grow_tree()
        if self.known.found is None and self.known.decided() and not self._late():
            return self._pass_the_gate(model)
        return self.so_far(*self._ended) if self._late() else self.so_far()

    def so_far(self, answer: Answer | None = None, reason: str | None = None) -> Verdict:
        """What is known at this moment; `answer` stands unless the property is decided."""
        answer = answer or "unknown"
        reason = self.reason if reason is None else reason
        if self.known.found is not None:
            answer, reason = "sat", "ONNX Runtime confirms the counterexample."
        elif self.certified is not None or (not self.check and self.ready and self.known.decided()):
            answer, reason = "unsat", self.reason or "Every case is refuted."
        elif self.ready and self.known.decided() and not self.rejected:
            reason = f"{_UNCHECKED} {reason}"
        boxes = self.splitter.seen if self.splitter else 0
        boxes += sum(splitter.seen for splitter in self.curved)
        if self.complete is not None and self.complete.tree is not None:
            boxes += self.complete.tree.seen
        return Verdict(
            answer,
            self.known.found,
            self.known.cases(self.splitter),
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

    # -- the order of things -------------------------------------------------------------------

    def _decide(self) -> Verdict:
        divide = Splitter.worthwhile(self.known.groups)
        if self.relaxation == "envelope" and divide:
            self.say("no envelopes: inputs are split instead")
        steps: list[Callable[[], None]] = [lambda: self.attacker.try_plans(attack.SHORT[:1])]
        if divide:
            # Whole boxes may be enough, and nothing has to be compiled for them.
            steps = [self._refute_whole_boxes, *steps, self._split_inputs]
        elif self._plantable():
            whole, complete = self.whole, self.complete
            assert complete is not None
            first: list[Callable[[], None]] = [
                lambda: self.whole.bound("ibp"),
                lambda: self.whole.bound("backward"),
            ]
            if self._small():
                first = [
                    lambda: whole.bound_by_checker(complete),
                    lambda: self._search_tree(FIRST_TREE_STEPS),
                ]
            if self.relaxation == "envelope":
                first.insert(
                    len(first) if not self._small() else 1, lambda: whole.bound_by_planes(complete)
                )
            if self._multiplies():
                # Attacks compile for long as well: what needs none comes first.
                steps = [
                    lambda: whole.bound_roughly(complete),
                    *([first.pop(0)] if self._small() else []),
                    *steps,
                ]
            if self._multiplies() and self._small():
                # Intervals would take longer to tighten than there is time: the tree is grown once.
                first = first[:-1]
            steps += [*first, lambda: self.attacker.try_plans(attack.SHORT), self._search_tree]
        else:
            if self.relaxation == "envelope":
                self.say("no envelopes: the checker does not know all of this network")
            steps += [
                lambda: self.whole.bound("ibp"),
                lambda: self.whole.bound("backward"),
                lambda: self.attacker.try_plans(attack.SECOND),
                lambda: self.whole.bound("nonconvex"),
                lambda: self.whole.bound("optimised"),
                lambda: self.attacker.try_plans(attack.LAST),
            ]
        for step in steps:
            step()
            if self._over():
                break
        if self._late() and not self.known.decided():
            return self.so_far(*self._ended)
        return self.so_far("unknown", self.reason or "All methods were tried.")

    def _late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    def _over(self) -> bool:
        return self.known.decided() or self._late()

    def _left(self) -> float | None:
        return None if self.deadline is None else max(self.deadline - time.monotonic(), 0.0)

    # -- splitting ---------------------------------------------------------------------------------

    def _split_inputs(self) -> None:
        """Splits boxes; where variables are multiplied, with bounds by quadratic forms."""
        assert self.opened is not None
        try:
            checker = self.checker = self.checker or Checker(self.opened.program, self.stated)
        except Refused:
            self._split()
            return
        if all(
            checker.quadratics(group.numbers[0]) and all(map(len, group.places))
            for group in self.known.groups
        ):
            self._split_by_forms(checker)
        else:
            self._split()

    def _split_by_forms(self, checker: Checker) -> None:
        plans, number, next_descent = itertools.cycle(attack.LAST), 0, 1
        for g, (group, state) in enumerate(zip(self.known.groups, self.known.states, strict=True)):
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
                    self.attacker.descend_from(splitter.points[:most], lanes[:most])
                    if not self._over():
                        some = itertools.islice(plans, number // FORM_STEPS_AN_ATTACK)
                        self.attacker.try_plans(tuple(some), corners=False)
                self.say(
                    f"splitting by quadratic forms: {splitter.seen} boxes, "
                    f"{len(splitter.stack)} waiting, {100 * splitter.finished:.4g} % decided"
                )
                if splitter.stuck:
                    self.reason = TOO_SMALL
                    return
                if self._over():
                    return
            for c in np.flatnonzero(~state.refuted):
                state.how[c], state.refuted[c] = "forms", True

    def _split(self) -> None:
        open_cases = [~state.refuted for state in self.known.states]
        checker = self.checker
        if checker is not None and sum(checker.given.sizes.values()) > SMALL:
            checker = None
        self.splitter = splitter = Splitter(
            self.network,
            self.known.groups,
            open_cases,
            keep=self.check,
            memory=self.memory,
            checker=checker,
        )
        self._restored("splitter", splitter)
        self._lasting = {"splitter": splitter}
        self._cut_boxes()

    def _cut_boxes(self) -> None:
        """Cuts boxes until none is open, or time is up; attacks in between."""
        splitter = self.splitter
        assert splitter is not None
        number, next_descent = 0, 1
        plans = itertools.cycle(attack.LAST)
        while len(splitter.stack):
            step = splitter.step(self._late)
            if step.points is None:
                return
            for g, bounds in step.roots or ():
                known = self.known.states[g].bounds
                np.fmax(known, bounds[: len(known)], out=known)
            if step.stuck:
                self.reason = TOO_SMALL
                return
            if len(splitter.stack) > splitter.most:
                self.reason = "The boxes that are left do not fit into the memory allowed."
                return
            number += 1
            self.attacker.watch(step, descend=number == next_descent)
            if number == next_descent:
                next_descent *= 3
                if len(splitter.stack) and not self._over():
                    self.attacker.try_faces()
                if not self._over():
                    some = itertools.islice(plans, number // STEPS_AN_ATTACK)
                    self.attacker.try_plans(tuple(some), corners=False)
            self.say(
                f"splitting: {splitter.seen} boxes, {len(splitter.stack)} waiting, "
                f"{100 * splitter.finished / splitter.total:.4g} % decided"
            )
            self._save_sometimes()
            if self._over():
                return
        for state in self.known.states:
            for c in np.flatnonzero(~state.refuted):
                state.how[c] = "splitting"
            state.refuted[:] = True

    # -- splits of neurons -------------------------------------------------------------------------

    def _plantable(self) -> bool:
        """Whether there can be a tree: the checker understands the model, and rows have limits."""
        assert self.opened is not None
        try:
            self.checker = self.checker or Checker(self.opened.program, self.stated)
        except Refused:
            return False
        self.complete = Complete(
            self.checker, self.known.groups, memory=self.memory, keep=self.check, team=self.team
        )
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

    def _refute_whole_boxes(self) -> None:
        """Refutes all cases over whole boxes as the checker does, or leaves everything as it is.

        Splitting boxes compiles for seconds, which is too long for what needs no splits.
        """
        bounds = []
        if len(self.known.groups) <= FEW_BOXES and self._plantable() and self._small():
            assert self.complete is not None
            for g, group in enumerate(self.known.groups):
                try:
                    bounds.append(self.complete.whole(g).bounds)
                except Refused:
                    break
                passes = group.passes(bounds[-1])
                if self._late() or not all(passes[rows].any() for rows in group.places):
                    bounds.pop()
                    break
        if len(bounds) == len(self.known.groups):
            for g, found in enumerate(bounds):
                self.known.note("backward", g, np.arange(len(found)), found)
        else:
            self.complete = None

    def _search_tree(self, steps: int | None = None) -> None:
        """Refutes the open cases on a tree of splits of neurons, for so many steps at first.

        What these leave open is searched anew on tighter intervals, until time is up.
        """
        assert self.complete is not None
        self.say("intervals for splits of neurons")
        open_ = [~state.refuted for state in self.known.states]
        try:
            if self._goes_on(open_):
                self._grow_tree()
                return
            tighten = steps is None and not self._multiplies()
            if tighten and not self.complete.tighten(open_, self._late):
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
        if steps is None:
            self.complete.share()
        begin, before = time.monotonic(), tree.seen
        # The first steps on loose intervals are not worth a file.
        self._lasting = {} if steps is not None else {"complete": self.complete}
        number, next_descent = 0, 1
        plans = itertools.cycle(attack.LAST)
        while not tree.done and number != steps:
            self.team.gather()
            met = tree.step()
            number += 1
            lanes = [(tree.roots[k].group, tree.roots[k].case) for k in met.roots]
            if number == next_descent and lanes:
                next_descent *= 3
                most = attack.lanes_at_once(self.network)
                worst = np.argsort(met.bounds, kind="stable")[:most]
                self.attacker.descend_from(met.points[worst], [lanes[k] for k in worst])
                if not self._over():
                    some = itertools.islice(plans, number // TREE_STEPS_AN_ATTACK)
                    self.attacker.try_plans(tuple(some), corners=False)
            self.say(
                f"splits of neurons: {tree.seen} nodes, "
                f"{(tree.seen - before) / max(time.monotonic() - begin, 1e-9):.3g} a second, "
                f"{len(tree.stack)} waiting, worst bound {tree.worst:.3g}, "
                f"{100 * tree.closed:.4g} % refuted"
            )
            self._save_sometimes()
            if tree.stuck:
                self.attacker.descend_from(met.points, lanes)
                self.reason = "A part of the tree can neither be split nor refuted."
            if self._over() or tree.stuck:
                return
        for root in tree.roots if tree.done else ():
            state = self.known.states[root.group]
            state.how[root.case], state.refuted[root.case] = "tree", True
