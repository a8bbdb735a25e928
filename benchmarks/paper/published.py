"""What the paper reports (NeurIPS 2020, Tables 1 and 2, and the two of its last appendix).

Its networks have other weights than those trained for this benchmark, and its times are of other
machines and other batches, so only orders of magnitude and behaviour can be compared. Bounds are
upper bounds on the adversary's objective: minus the lower bounds on margins.
"""

SIZES = ("tiny", "small", "medium")


def _by_size(activation: str, training: str, values) -> dict[str, float | None]:
    return {
        f"{size}_{activation}_{training}": value
        for size, value in zip(SIZES, values, strict=True)
        if value is not None
    }


# For each method: bounds of tiny, small, medium, and milliseconds.
_TABLE_1 = {
    "relu": {
        "ibp": ((17.0, 743, 2.4e6), (5.5, 3.1, 3.3)),
        "deepverify": ((13.7, 544, 1.6e6), (349, 711, 1.1e3)),
        "paper": ((5.68, 434.9, 1.5e6), (91.2, 177, 175)),
        "scs": ((5.64, None, None), (1.7e5, None, None)),
        "ecos": ((5.64, None, None), (4.3e4, None, None)),
    },
    "softplus": {
        "ibp": ((18.3, 6.5e3, 2.0e9), (4, 2.5, 3.3)),
        "deepverify": ((13.7, 5.1e3, 1.5e9), (414, 855, 1.7e3)),
        "paper": ((5.97, 3.93e3, 1.3e9), (7.8, 65, 214)),
        "scs": ((5.97, None, None), (2.9e5, None, None)),
    },
}
_IBP_MILLISECONDS = {
    "relu": {
        "ibp": (3.4, 2.8, 3.2),
        "deepverify": (338, 658, 1171),
        "paper": (93, 176, 297),
        "scs": (78.4e3, None, None),
        "ecos": (41.2e3, None, None),
    },
    "softplus": {
        "ibp": (3.9, 2.3, 2.8),
        "deepverify": (403, 842, 1620),
        "paper": (6.1, 61, 210),
        "scs": (32.1e4, None, None),
    },
}

# (method, network) -> number.
BOUND: dict[tuple[str, str], float] = {}
MILLISECONDS: dict[tuple[str, str], float] = {}
for _activation, _rows in _TABLE_1.items():
    for _method, (_bounds, _times) in _rows.items():
        for _network, _value in _by_size(_activation, "adv", _bounds).items():
            BOUND[_method, _network] = _value
        for _network, _value in _by_size(_activation, "adv", _times).items():
            MILLISECONDS[_method, _network] = _value
for _activation, _rows in _IBP_MILLISECONDS.items():
    for _method, _times in _rows.items():
        for _network, _value in _by_size(_activation, "ibp", _times).items():
            MILLISECONDS[_method, _network] = _value

# (method, network) -> (early stopping in per cent, average number of iterations).
STOPPING: dict[tuple[str, str], tuple[float, float]] = {
    ("deepverify", "tiny_relu_adv"): (37, 384),
    ("paper", "tiny_relu_adv"): (73, 18),
    ("deepverify", "small_relu_adv"): (0, 500),
    ("paper", "small_relu_adv"): (97, 9),
    ("deepverify", "medium_relu_adv"): (63, 284),
    ("paper", "medium_relu_adv"): (100, 5),
    ("deepverify", "tiny_softplus_adv"): (14, 467),
    ("paper", "tiny_softplus_adv"): (100, 4),
    ("deepverify", "small_softplus_adv"): (0, 500),
    ("paper", "small_softplus_adv"): (100, 7),
    ("deepverify", "medium_softplus_adv"): (0, 500),
    ("paper", "medium_softplus_adv"): (59, 25),
    ("deepverify", "tiny_relu_ibp"): (92, 242),
    ("paper", "tiny_relu_ibp"): (99, 6.5),
    ("deepverify", "small_relu_ibp"): (25, 479),
    ("paper", "small_relu_ibp"): (99, 5.5),
    ("deepverify", "medium_relu_ibp"): (3, 491),
    ("paper", "medium_relu_ibp"): (100, 4.92),
    ("deepverify", "tiny_softplus_ibp"): (91, 238.33),
    ("paper", "tiny_softplus_ibp"): (100, 7.4),
    ("deepverify", "small_softplus_ibp"): (0, 500),
    ("paper", "small_softplus_ibp"): (99, 8.5),
    ("deepverify", "medium_softplus_ibp"): (0, 500),
    ("paper", "medium_softplus_ibp"): (98, 9.8),
}
