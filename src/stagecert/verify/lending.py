"""Parts of a tree that other processes work on for a while.

What is lent is a station with all that is open there, or some of the nodes where stations are not
split. It comes back as what has become of it: grown, split further, or refuted.
"""

import time
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagecert.verify.nodes import Form
from stagecert.verify.stations import Station
from stagecert.verify.team import PATIENT, Lost, Member, Team
from stagecert.verify.tree import Plot, Root, Tree
from stagecert_check.graph import Program

# Seconds after which what was lent comes back, and how many loans a process has: one waits.
SLICE, LOANS = 0.5, 2
MANY = 8  # so many batches have to be open for that; where there are fewer, it is back earlier
FEWEST = 16  # nodes that have to be open before some are lent


@dataclass(eq=False)
class Piece:
    """Part of a tree, in numbers of its own.

    Attributes:
        nodes: all that were made there, after those that were given.
        rows: of the stack.
        waiting, active: stations that wait for their nodes to be put there, and the others.
        stations: of both, and those that were split.
        leaves: what was refuted, as the tree holds it.
        units, margin: of all roots.
        spare: bytes that further stations may take.
        seen, closed, worst: nodes, share of the roots, and bound.
    """

    nodes: dict[str, np.ndarray]
    rows: dict[str, np.ndarray]
    waiting: list[Plot]
    active: dict[int, Plot]
    stations: list[Station]
    leaves: list[dict[str, Any]]
    units: np.ndarray
    margin: np.ndarray
    spare: float
    seen: int = 0
    closed: float = 0.0
    worst: float = np.inf


@dataclass(eq=False)
class Loan:
    """What is away.

    Attributes:
        piece: as it was given.
        nodes, stations: which numbers they have here.
        whole: whether stations are away with it, rather than only nodes.
    """

    member: Member
    answer: Future
    piece: Piece
    nodes: np.ndarray
    stations: np.ndarray
    whole: bool


class Lender:
    """Lends parts of a tree to a team."""

    def __init__(self, tree: Tree, team: Team):
        self.tree, self.team = tree, team
        self.loans: list[Loan] = []
        tree.most //= team.size

    def tend(self) -> None:
        """Takes back what is finished, and lends anew."""
        for loan in [loan for loan in self.loans if loan.answer.done()]:
            self._take_back(loan)
        for member in list(self.team.members) * LOANS:
            mine = sum(loan.member is member for loan in self.loans)
            if mine < LOANS and not self._lend(member):
                return

    def wait(self) -> None:
        """Waits for a moment, or until something comes back."""
        wait([loan.answer for loan in self.loans], PATIENT, return_when=FIRST_COMPLETED)

    def recall(self, seconds: float) -> None:
        """Has everything back: in the state in which it was lent, if it does not come in time."""
        wait([loan.answer for loan in self.loans], seconds)
        for loan in list(self.loans):
            if loan.answer.done():
                self._take_back(loan)
            else:
                self.loans.remove(loan)
                self._merge(loan, loan.piece)

    def _take_back(self, loan: Loan) -> None:
        self.loans.remove(loan)
        try:
            grown = loan.answer.result()
        except (Lost, CancelledError):
            if loan.member in self.team.members:
                self.team.drop(loan.member)
            grown = None
        # What got stuck is looked at here.
        self._merge(loan, loan.piece if grown is None else grown)

    # -- there and back ------------------------------------------------------------------------

    def _lend(self, member: Member) -> bool:
        """Lends a share of what is open; whether there was something to lend."""
        tree = self.tree
        of = tree.nodes["station"][tree.stack["node"]]
        waiting = [len(plot.fields["node"]) for plot in tree.plots]
        total = len(of) + sum(waiting)
        if total < FEWEST:
            return False
        share = total / (LOANS * self.team.size)
        some = np.zeros(len(of), bool)
        plots: list[Plot] = []
        numbers, first, counts = np.unique(of, return_index=True, return_counts=True)
        lent = 0
        # The oldest first: below them there is most. What is on top stays.
        while tree.plots and lent < share and (lent + waiting[len(plots)] < total):
            lent += waiting[len(plots)]
            plots.append(tree.plots.pop(0))
        active: dict[int, Plot] = {}
        for k in np.argsort(first, kind="stable")[:-1] if not plots else ():
            if lent >= share:
                break
            number = int(numbers[k])
            active[number] = tree.active.pop(number)
            some |= of == number
            lent += int(counts[k])
        whole = bool(plots or active)
        if not whole:
            if not len(numbers):
                return False  # all there is waits, and is next here
            number = int(numbers[0])
            if tree.active[number].budget < np.inf:
                return False
            node = tree.stack["node"]
            parent = tree.nodes["parent"][node]
            deep = (parent >= 0) & (tree.nodes["station"][parent] == of)
            some[np.flatnonzero(deep)[: int(share)]] = True
            if not some.any():
                return False
            nothing = {"node": np.zeros(0, int)}
            active[number] = Plot(number, nothing, np.zeros(tree.form.neurons), np.inf)
        rows = tree.stack.taken(some)
        # Where little is left, nobody should wait for long.
        seconds = SLICE * min(total / (MANY * tree.batch), 1)
        self._send(member, rows, plots, active, whole, seconds)
        return True

    def _send(self, member: Member, rows, waiting, active, whole: bool, seconds: float) -> None:
        tree = self.tree
        both = [*waiting, *active.values()]
        nodes = np.unique(np.concatenate([rows["node"], *(x.fields["node"] for x in both)]))
        stations = np.array([plot.station for plot in both if plot.station >= 0], int)

        def there(x: np.ndarray) -> np.ndarray:
            return np.searchsorted(nodes, x)

        given = {name: tree.nodes[name][nodes] for name in ("neuron", "cut", "root")}
        number = {-1: -1} | {int(k): place for place, k in enumerate(stations)}
        given["station"] = np.array([number[int(k)] for k in tree.nodes["station"][nodes]])
        nothing = np.full(len(nodes), -1)
        piece = Piece(
            given | {"parent": nothing, "child": nothing},
            rows | {"node": there(rows["node"])},
            [_renumbered(plot, number, there) for plot in waiting],
            {number[k]: _renumbered(plot, number, there) for k, plot in active.items()},
            [tree.stations[k] for k in stations], [], tree.units, tree.margin,
            tree.spare / self.team.size,
        )  # fmt: skip
        if member.planted is not tree:
            member.planted = tree
            member.ask(plant, tree.program, tree.roots, tree.most, tree.keep)
        answer = member.ask(work, piece, seconds)
        self.loans.append(Loan(member, answer, piece, nodes, stations, whole))

    def _merge(self, loan: Loan, grown: Piece) -> None:
        """Puts a piece where it belongs."""
        tree, given, base = self.tree, len(loan.nodes), len(self.tree.nodes)
        first = len(tree.stations)
        stations = np.concatenate([
            loan.stations, first + np.arange(len(grown.stations) - len(loan.stations)), [-1],
        ]).astype(int)  # fmt: skip

        def here(x: np.ndarray) -> np.ndarray:
            old = loan.nodes[np.clip(x, 0, given - 1)] if given else x
            return np.where(x < 0, -1, np.where(x < given, old, base + x - given))

        news = {name: x[given:] for name, x in grown.nodes.items()}
        tree.nodes.extend(**news | {
            "parent": here(news["parent"]), "child": here(news["child"]),
            "station": stations[news["station"]],
        })  # fmt: skip
        split = grown.nodes["child"][:given] >= 0
        at = loan.nodes[split]
        tree.nodes["child"][at] = here(grown.nodes["child"][:given][split])
        for name in ("neuron", "cut"):
            tree.nodes[name][at] = grown.nodes[name][:given][split]
        tree.stations += grown.stations[len(loan.stations) :]
        tree.spare -= sum(x.size for x in grown.stations[len(loan.stations) :])
        tree.leaves += [leaf | {"node": here(leaf["node"])} for leaf in grown.leaves]
        tree.stack.extend(**grown.rows | {"node": here(grown.rows["node"])})
        number = {place: int(k) for place, k in enumerate(stations[:-1])} | {-1: -1}
        tree.plots += [_renumbered(plot, number, here) for plot in grown.waiting]
        for plot in grown.active.values():
            if loan.whole:
                tree.active[number[plot.station]] = _renumbered(plot, number, here)
            else:
                known = tree.active[number[plot.station]]
                known.seen += plot.seen
                for root, share in plot.closed.items():
                    known.closed[root] = known.closed.get(root, 0.0) + share
        tree.seen += grown.seen
        tree.closed += grown.closed
        tree.worst = min(tree.worst, grown.worst)


def _renumbered(plot: Plot, stations: dict[int, int], nodes) -> Plot:
    fields = plot.fields | {"node": nodes(plot.fields["node"])}
    return Plot(stations[plot.station], fields, plot.scores, plot.budget, plot.seen, plot.closed)


# -- in the other process --------------------------------------------------------------------------

_trees: list[Tree] = []


def plant(program: Program, roots: list[Root], most: int, keep: bool) -> None:
    """Makes a tree of the same roots, on which there is nothing yet."""
    tree = Tree(program, Form(program), roots, keep=keep)
    tree.most = most
    _trees[:] = [tree]


def work(piece: Piece, seconds: float) -> Piece | None:
    """What becomes of a piece; None if it gets stuck."""
    tree, end = _trees[0], time.monotonic() + seconds
    _load(tree, piece)
    while not (tree.done or tree.stuck) and time.monotonic() < end:
        tree.step()
    if tree.stuck:
        return None
    rows = tree.stack.taken(np.ones(len(tree.stack), bool))
    numbers = np.unique(tree.nodes["station"][rows["node"]]).tolist()
    return Piece(
        {name: tree.nodes[name].copy() for name in piece.nodes}, rows, tree.plots,
        {number: plot for number, plot in tree.active.items() if number in numbers or number < 0},
        tree.stations, tree.leaves, tree.units[:0], tree.margin[:0], 0.0, tree.seen, tree.closed,
        tree.worst,
    )  # fmt: skip


def _load(tree: Tree, piece: Piece) -> None:
    """Makes a tree of the same roots have what is in a piece, and nothing else."""
    for grown, given in ((tree.stack, piece.rows), (tree.nodes, piece.nodes)):
        grown.keep(np.zeros(len(grown), bool))
        grown.extend(**given)
    tree.plots, tree.active, tree.stations = piece.waiting, piece.active, piece.stations
    tree.leaves, tree.units, tree.margin = [], piece.units, piece.margin
    tree.spare, tree.seen, tree.closed, tree.stuck = piece.spare, 0, 0.0, False
