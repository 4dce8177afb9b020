"""Measured choices (ops/cuda/tune.py): the file, its validation, and the rules for candidates."""

from __future__ import annotations

import json

import pytest
import torch

from ops.cuda import tune
from ops.cuda.tune import FUSED, LIBRARY, TRITON, Choice, Job, Shape, Table, candidates
from ops.triton_kernels.linear import MAX_SPLIT_SUMS, Tile

ABOUT = {"device": "one", "torch": "2", "triton": "3"}
SHAPE = Shape("int8", 64, 4096, 4096)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "tuned.json"


def test_saved_choices_are_loaded(path):
    options, other = candidates(SHAPE, 90), SHAPE._replace(adds=True)
    table = Table(path, ABOUT)
    assert table.get(SHAPE, options) is None
    table.put(SHAPE, options[1])
    table.put(other, options[-1])
    table.save()
    again = Table(path, ABOUT)
    assert again.get(SHAPE, options) == options[1] and again.get(other, options) == options[-1]
    assert [file.name for file in path.parent.iterdir()] == ["tuned.json"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"format": 2}',
        json.dumps({"format": 1, "about": {**ABOUT, "triton": "4"}, "choices": {}}),
        json.dumps({"format": 1, "about": ABOUT, "choices": 5}),
        "\udcff",
    ],
)
def test_an_invalid_file_is_ignored(path, content, caplog):
    path.parent.mkdir()
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    table = Table(path, ABOUT)
    assert table.get(SHAPE, candidates(SHAPE, 90)) is None
    assert "not used" in caplog.text
    table.put(SHAPE, candidates(SHAPE, 90)[0])
    table.save()
    assert Table(path, ABOUT).get(SHAPE, candidates(SHAPE, 90)) is not None


@pytest.mark.parametrize("line", [None, 3, "x", [], ["triton"], ["triton", [1] * 8], [[], {}]])
def test_an_invalid_line_is_ignored(path, line, caplog):
    table = Table(path, ABOUT)
    table.put(SHAPE, candidates(SHAPE, 90)[0])
    table.save()
    content = json.loads(path.read_text())
    (key,) = content["choices"]
    content["choices"][key] = line
    path.write_text(json.dumps(content))
    assert Table(path, ABOUT).get(SHAPE, candidates(SHAPE, 90)) is None
    assert line is None or "no choice" in caplog.text


def test_an_unwritable_folder_is_no_error(path):
    path.parent.parent.joinpath("deep").write_text("a file")
    with pytest.raises(OSError, match="deep"):
        Table(path, ABOUT).save()


def test_the_cache_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tune.cache_folder() == tmp_path / "mergestep"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(tune.cache_folder()) == "/home/someone/.cache/mergestep"


def test_measuring_needs_a_device():
    with pytest.raises(RuntimeError, match="no CUDA device"):
        tune.tune([], torch.device("cpu"))


@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize("kernel", ["int8", "int4", "fp8"])
def test_rules_hold_everywhere(kernel, capability):
    """From tiny shapes to a large model's head there is a candidate, its tiles are valid, and
    none repeats."""
    for rows in (1, 2, 4, 8, 16, 32, 64, 128, 1024, 8192):
        for outputs in (1, 64, 1024, 4096, 28672, 152_064):
            for inputs in (1, 48, 4096, 14336):
                shape = Shape(kernel, rows, outputs, inputs)
                choices = candidates(shape, capability)
                fused = [c for c in choices if c.implementation == FUSED]
                assert choices and choices[0].implementation == TRITON
                assert bool(fused) == (kernel == "int8" and rows <= 4 and rows * inputs <= 16384)
                assert all(c.tile.swap and c.tile.m >= rows for c in fused)
                assert len(set(choices)) == len(choices)
                for choice in choices:
                    check_tile(choice.tile, shape)
                library = [c for c in choices if c.implementation == LIBRARY]
                assert not library or (rows > 16 and outputs % 16 == 0 and kernel != "int4")


def check_tile(tile: Tile, shape: Shape) -> None:
    assert all(n & (n - 1) == 0 for n in tile[:4]), f"no power of two: {tile}"
    assert tile.k >= 32 and 1 <= tile.split_k <= 8
    if shape.kernel != "int8":
        assert tile.split_k == 1, "floating-point sums are not split"
    if tile.split_k > 1:
        blocks = -(-shape.num_in // tile.k)
        per_split = -(-blocks // tile.split_k)
        assert per_split * (tile.split_k - 1) < blocks + per_split, "parts may be empty, but few"
        tiles = -(-shape.rows // tile.m) * -(-shape.num_out // tile.n)
        assert tiles * tile.m * tile.n <= MAX_SPLIT_SUMS


def test_large_products_have_enough_programs():
    for rows in (1, 16, 64):
        tile = candidates(Shape("int8", rows, 4096, 4096), 90)[0].tile
        assert -(-rows // tile.m) * (4096 // tile.n) * tile.split_k >= 100
        narrow = candidates(Shape("int8", rows, 512, 8192), 90)[0].tile
        assert narrow.split_k > 1


def test_a_candidate_with_another_result_or_an_error_is_not_chosen(monkeypatch, caplog):
    options = [Choice(TRITON, tile) for tile in (Tile(16, 32, 64, 4, n) for n in (2, 3, 4, 5))]
    times = dict(zip(options, (4.0, 1.0, 2.0, 3.0), strict=True))

    def run(choice: Choice) -> torch.Tensor:
        if choice is options[2]:
            raise RuntimeError("out of resource")
        return torch.ones(3) * (2 if choice is options[1] else 1)

    timed = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(tune, "measure", lambda one, flush: timed.append(one()) or 3.0)
    choices = tune._times(Job(SHAPE, run, is_exact=True), options, torch.empty(0))
    assert choices == {options[0]: 3.0, options[3]: 3.0} and len(timed) == 2 and times
    assert "another result" in caplog.text and "out of resource" in caplog.text


def test_agreement():
    one = torch.tensor([1.0, 100.0])
    assert tune.agrees(one, one.clone(), is_exact=True)
    assert not tune.agrees(one + 1e-3, one, is_exact=True)
    assert tune.agrees(one + 0.5, one, is_exact=False)
    assert not tune.agrees(one + 2, one, is_exact=False)
    assert not tune.agrees(one * float("nan"), one, is_exact=False)
