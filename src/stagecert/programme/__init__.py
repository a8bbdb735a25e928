"""Problems that are linear or quadratic programmes, written down sparsely; a solver by these.

Objectives that are convex quadratics of affine functions and of maxima, with bounds and constraints
that are affine or such maxima, over boxes and simplices, are quadratic programmes. The traced
functions are read equation by equation (`reading`): a value is a sparse matrix times the variables,
plus products of two such (`values`). Scanned stages are read through their vmapped step, so the
work grows with the length and nothing is unrolled. A maximum becomes a variable above its
arguments; the multipliers of these inequalities are its slopes (`writing`).

The solution (`quadratic`) is a proposal like any other. Where the steps of `polish` wait for news
to travel through long horizons of kinks, the factorisations of an interior-point method do not.
"""
