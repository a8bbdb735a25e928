"""Boxes around images, against exact arithmetic; data sets that are wrong in many ways."""

import io
import random
import zipfile
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from stagecert.errors import ProblemError
from stagecert.robust.boxes import Preparation, boxes_around
from stagecert.robust.data import data_set, load, number

F = Fraction


def stored(pixel, dtype) -> Fraction:
    return F(int(pixel), 255) if dtype == np.uint8 else F(float(pixel))


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64])
@pytest.mark.parametrize("eps", ["0", "8/255", "1/3", "1e-9", "2"])
@pytest.mark.parametrize("normal", [("0", "1"), ("1/3,0.4914,-1e-3", "0.2023,1/7,3")])
@pytest.mark.parametrize("clip", [None, ("0", "1"), ("-1/3", "1")])
def test_outer_boxes_contain_the_exact_ones_and_inner_ones_lie_inside(dtype, eps, normal, clip):
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (4, 3, 2, 2)).astype(np.uint8)
    if dtype != np.uint8:
        images = draw.random((4, 3, 2, 2)).astype(dtype)
        images[0, :, 0, 0], images[0, :, 0, 1] = 0, 1
    mean, std = (tuple(number(v, "n") for v in text.split(",")) for text in normal)
    ends: Any = None if clip is None else tuple(number(v, "clip") for v in clip)
    how = Preparation(number(eps, "eps"), ends, mean, std)
    how.check(images)
    boxes = boxes_around(images, how)
    assert boxes.least.dtype == boxes.most.dtype == boxes.centre.dtype == np.float32
    assert np.all(boxes.lower <= boxes.least)
    assert np.all(boxes.least <= boxes.most)
    assert np.all(boxes.most <= boxes.upper)
    assert np.all((boxes.lower <= boxes.centre) & (boxes.centre <= boxes.upper))
    plain = normal == ("0", "1")
    for at in np.ndindex(images.shape):
        m, s = (v[at[1] % len(v)] for v in (mean, std))
        single = np.float32(images[at]) / np.float32(255) if dtype == np.uint8 else None
        single = F(float(np.float32(images[at]) if single is None else single))
        exact = []
        for pixel in (stored(images[at], dtype), single):
            low, high = pixel - how.eps, pixel + how.eps
            if ends is not None:
                low, high = max(low, ends[0]), min(high, ends[1])
            exact.append(((low - m) / s, (high - m) / s))
        for low, high in exact:
            assert F(float(boxes.lower[at])) <= low
            assert high <= F(float(boxes.upper[at]))
            # Not much wider than they must be: float32 of a pixel is off by 1e-7 at most.
            assert low - F(float(boxes.lower[at])) < F(1, 10**6)
            assert F(float(boxes.upper[at])) - high < F(1, 10**6)
        if plain or how.eps > F(1, 10**6):
            # The point that is attacked belongs to the exact box around the float32 image.
            low, high = exact[1]
            assert low <= F(float(boxes.least[at]))
            assert F(float(boxes.most[at])) <= high


@pytest.mark.parametrize(
    ("text", "value"),
    [("8/255", F(8, 255)), ("0.1", F(1, 10)), ("1e-3", F(1, 1000)), (0.5, F(1, 2)), (2, F(2)),
     (np.float32(0.1), F(float(np.float32(0.1)))), (" 1/4 ", F(1, 4))],
)  # fmt: skip
def test_numbers_are_exact(text, value):
    assert number(text, "eps") == value


@pytest.mark.parametrize(
    "text", ["", "eight", "1/0", "nan", "inf", "1e999999999", "1/2/3", None, float("nan"), "0x10"]
)
def test_numbers_that_are_none(text):
    with pytest.raises(ProblemError, match="eps must be a number like"):
        number(text, "eps")


def images(*shape, dtype: Any = np.float32):
    return np.zeros(shape, dtype)


def test_channels_last_and_pictures_without_colours_are_arranged():
    draw = np.random.default_rng(0)
    colour = draw.random((2, 5, 4, 3)).astype(np.float32)
    assert np.array_equal(
        data_set(colour, [0, 1], (3, 5, 4), 2).images, colour.transpose(0, 3, 1, 2)
    )
    grey = draw.random((2, 5, 4)).astype(np.float32)
    for shape in ((5, 4), (1, 5, 4), (5, 4, 1), (20,)):
        for given in (grey, grey[:, None], grey[..., None], grey.reshape(2, 20)):
            found = data_set(given, [0, 1], shape, 2).images
            assert found.shape == (2, *shape)
            assert np.array_equal(found.reshape(2, 5, 4), grey)


@pytest.mark.parametrize(
    ("x", "y", "shape", "message"),
    [
        (images(2, 32, 32, 3), [0, 1], (3072,), "not clear: reshape"),
        (images(2, 3, 32, 32), [0, 1], (3072,), "not clear: reshape"),
        (images(2, 3, 32, 32), [0, 1], (32, 32, 3), "not clear: reshape"),
        (images(2, 4, 5), [0, 1], (5, 4), "Each image is 4 x 5, but the model takes 5 x 4"),
        (images(2, 7), [0, 1], (8,), "Each image is 7, but the model takes 8"),
        (images(2), [0, 1], (8,), "Each image is number"),
        (images(0, 8), [], (8,), "no images"),
        (np.float32(1), [0], (8,), "no images"),
        (images(2, 8, dtype=np.int32), [0, 1], (8,), "images are int32"),
        (images(2, 8, dtype=bool), [0, 1], (8,), "images are bool"),
        (images(2, 8, dtype=np.complex64), [0, 1], (8,), "images are complex64"),
        (np.array([[0, np.nan]]), [0], (2,), r"not finite at \[0, 1\]: nan"),
        (np.array([[0, np.inf]]), [0], (2,), r"not finite at \[0, 1\]: inf"),
        (images(2, 8), [0], (8,), r"labels must have shape \(2,\)"),
        (images(2, 8), [[1, 0], [0, 1]], (8,), r"labels must have shape \(2,\)"),
        (images(2, 8), [0, 3], (8,), r"labels\[1\] is 3, but the model has 3 outputs"),
        (images(2, 8), [-1, 0], (8,), r"labels\[0\] is -1"),
        (images(2, 8), [0.5, 0], (8,), r"labels\[0\] is 0.5"),
        (images(2, 8), [np.nan, 0], (8,), r"labels\[0\] is nan"),
        (images(2, 8), np.array([2**63, 0], np.uint64), (8,), r"labels\[0\] is 92233720368"),
        (images(2, 8), ["a", "b"], (8,), "labels must be whole numbers"),
    ],
)  # fmt: skip
def test_data_that_does_not_fit(x, y, shape, message):
    with pytest.raises(ProblemError, match=message):
        data_set(x, y, shape, 3)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (Preparation(F(-1)), "eps must not be negative"),
        (Preparation(F(10**31)), "eps must be at most 1e30"),
        (Preparation(F(0), (F(1), F(0))), "clip must be a range"),
        (Preparation(F(0), (F(0), F(1, 2))), r"has 0.75 at \[0, 0, 0, 1\], outside of 0,1/2"),
        (Preparation(F(0), std=(F(0),)), "std must be positive"),
        (Preparation(F(0), mean=(F(0),) * 2), "mean has 2 entries, but images have 1 channels"),
    ],
)  # fmt: skip
def test_preparations_that_do_not_fit(how, message):
    with pytest.raises(ProblemError, match=message):
        how.check(np.array([0.25, 0.75]).reshape(1, 1, 1, 2))


def saved(**arrays) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def test_names_of_arrays(tmp_path):
    path = tmp_path / "data.npz"
    path.write_bytes(saved(x_test=np.ones(3), y_test=np.arange(3), extra=np.zeros(2)))
    x, y = load(path)
    assert np.array_equal(x, np.ones(3))
    assert np.array_equal(y, np.arange(3))
    assert np.array_equal(load(path, "extra")[0], np.zeros(2))
    with pytest.raises(ProblemError, match=r"no array 'pixels'. Its arrays: x_test, y_test, extra"):
        load(path, "pixels")
    path.write_bytes(saved(a=np.ones(3)))
    with pytest.raises(ProblemError, match=r"no array of images.*Its arrays: a.*--images"):
        load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no .npz file"),
        (b"rubbish" * 100, "is no .npz file"),
        (saved(images=np.array([{}], object), labels=np.zeros(1)), "cannot be read: Object arrays"),
        (saved(images=np.ones(300), labels=np.zeros(300))[:-300], "is no .npz file"),
    ],
)
def test_files_that_are_none(tmp_path, content, message):
    path = tmp_path / "data.npz"
    path.write_bytes(content)
    with pytest.raises(ProblemError, match=message):
        load(path)


def test_missing_files_and_headers_that_lie(tmp_path):
    with pytest.raises(ProblemError, match="does not exist"):
        load(tmp_path / "none.npz")
    with pytest.raises(ProblemError, match="cannot be read"):
        load(tmp_path)
    path = tmp_path / "data.npz"
    with zipfile.ZipFile(path, "w") as archive:
        with archive.open("images.npy", "w") as part:
            header = {"descr": "<f8", "fortran_order": False, "shape": (2**50,)}
            np.lib.format.write_array_header_1_0(part, header)
        archive.writestr("labels.npy", b"")
    with pytest.raises(ProblemError, match="cannot be read"):
        load(path)


def test_mutated_files_give_clear_errors_or_data(tmp_path):
    draw = random.Random(0)
    path = tmp_path / "data.npz"
    good = saved(images=np.random.default_rng(0).random((3, 2, 2)), labels=np.arange(3))
    refused = 0
    for _ in range(1500):
        content = bytearray(good)
        for _ in range(draw.choice((1, 1, 2, 8))):
            at = draw.randrange(len(content))
            kind = draw.randrange(3)
            if kind == 0:
                content[at] = draw.randrange(256)
            elif kind == 1:
                del content[at : at + draw.randrange(1, 20)]
            else:
                content[at:at] = draw.randbytes(draw.randrange(1, 20))
        path.write_bytes(content)
        try:
            found = data_set(*load(path), (2, 2), 3)
        except ProblemError:
            refused += 1
        else:
            assert found.images.shape == (len(found), 2, 2)
            assert np.all(np.isfinite(found.images))
    assert refused > 1000
