"""Stagewise convex problems, solved with a certificate."""

from stagecert.batch import Batch, BatchSolution, stack
from stagecert.certificate import Anchor, Certificate, lower_bound
from stagecert.errors import ProblemError
from stagecert.pieces import abs, max, maximum, min, minimum, piecewise_linear, relu
from stagecert.problem import Objective, Problem, ScanStage, Stage
from stagecert.reformulation import Point
from stagecert.sets import Ball, Box, Product, Simplex
from stagecert.solution import Solution, Status
from stagecert.solve import solve, solve_batch
