"""Prompt chunks go through a library's kernel; the libraries are torch behind their signatures."""

from __future__ import annotations

import logging
import types

import pytest
import torch

from ops.reference import attention_fp64
from tests.support.cuda.cuda_kv import DEVICE, Tiles, random_kv, random_q

from ops.cuda.attention import CudaAttentionLayer, KVTiles, layer_bytes  # isort: skip
from ops.cuda.prefill import (  # isort: skip
    Candidate, LibraryPrefill, installed, of_cudnn, of_flash_attn, of_flashinfer, of_torch_flash,
    own_attention,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("seeded")
BF16 = torch.bfloat16


def exact(q, k, v, scale, window):
    return attention_fp64(q, k, v, scale, window=window)[0].to(q.dtype)


def single_prefill_with_kv_cache(
    q, k, v, *, causal, kv_layout, sm_scale, window_left, return_lse=False
):
    assert causal and kv_layout == "NHD" and q.is_contiguous() and not return_lse
    return exact(q, k, v, sm_scale, None if window_left < 0 else window_left + 1)


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):
    assert causal and q.dim() == 4 and window_size[1] in (-1, 0)
    window = None if window_size[0] < 0 else window_size[0] + 1
    return exact(q[0], k[0], v[0], softmax_scale, window)[None]


def torch_flash(q, k, v, dropout_p, is_causal, return_debug_mask, *, scale):
    assert is_causal and not dropout_p and not return_debug_mask
    out = exact(*(x[0].transpose(0, 1) for x in (q, k, v)), scale, None)
    return out.transpose(0, 1)[None], None


def cudnn(q, k, v, bias, compute_log_sumexp, dropout_p, is_causal, debug, *, scale):
    """cuDNN's causal mask begins at the first key."""
    assert bias is None and compute_log_sumexp and not dropout_p and not debug
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    out, lse = attention_fp64(q, k, v, scale, first_position=0 if is_causal else len(k))
    return out.to(q.dtype).transpose(0, 1)[None], lse.float().T[None, ..., None]


def flash_attn_3(*args, **named):
    return flash_attn_func(*args, **named), None


FLASHINFER = types.SimpleNamespace(single_prefill_with_kv_cache=single_prefill_with_kv_cache)
LIBRARIES = {
    candidate.name: candidate
    for candidate in (
        Candidate("flashinfer", of_flashinfer(FLASHINFER), True),
        Candidate("flash_attn", of_flash_attn(flash_attn_func), True),
        Candidate("flash_attn 3", of_flash_attn(flash_attn_3), True),
        Candidate("torch flash", of_torch_flash(torch_flash), False),
        Candidate("cudnn", of_cudnn(cudnn), False),
    )
}


def layer(window=None, dim=64) -> KVTiles:
    size = layer_bytes(2, dim, torch.int8, 32)
    return KVTiles(4, 2, dim, dim**-0.5, window, torch.int8, 32, size, 0)


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("window", [None, 40])
def test_each_library_passes_the_test_against_exact_attention(name, window):
    candidate = LIBRARIES[name]
    prefill = LibraryPrefill([candidate], DEVICE)
    is_right = prefill.prepare([layer(window)], exact, lambda attend, tiles: 1.0)
    assert is_right == (window is None or candidate.has_windows)


@pytest.mark.exhaustive
def test_our_kernel_equals_exact_attention():
    prefill = LibraryPrefill([LIBRARIES["flash_attn"]], DEVICE)
    assert prefill.prepare([layer(), layer(window=40)])
    q, k, v = random_q(20, 4, 64), *random_kv(50, 2, 64)
    found = own_attention(q, k.to(DEVICE), v.to(DEVICE), 0.125, 30)
    assert (found.cpu() - exact(q.cpu(), k, v, 0.125, 30)).abs().max() < 0.03


def broken(q, k, v, scale, window):
    raise RuntimeError("no kernel image")


def one_off(q, k, v, scale, window):
    return attention_fp64(q, k, v, scale, first_position=len(k) - len(q) + 1)[0].to(q.dtype)


def wide_window(q, k, v, scale, window):
    return exact(q, k, v, scale, window and window + 1)


def not_numbers(q, k, v, scale, window):
    return torch.full_like(q, float("nan"))


@pytest.mark.parametrize("attend", [broken, one_off, wide_window, not_numbers])
def test_a_failing_or_wrong_kernel_is_not_chosen(attend, caplog):
    caplog.set_level(logging.INFO)
    bad = Candidate("bad", attend, True)
    quick = {attend: 0.1}
    measure = lambda attend, tiles: quick.get(attend, 1.0)  # noqa: E731
    prefill = LibraryPrefill([bad, LIBRARIES["flashinfer"]], DEVICE)
    assert prefill.prepare([layer(window=20)], exact, measure)
    assert "flashinfer (flashinfer 1000.000 ms)" in caplog.text and "bad" in caplog.text
    assert not LibraryPrefill([bad], DEVICE).prepare([layer(window=20)], exact, measure)


def test_the_quickest_is_chosen_for_each_shape():
    times_by_name = {"flashinfer": 3.0, "flash_attn": 2.0, "cudnn": 1.0}
    times = {LIBRARIES[name].attend: t for name, t in times_by_name.items()}
    prefill = LibraryPrefill([LIBRARIES[name] for name in times_by_name], DEVICE)
    shapes = [layer(), layer(window=9), layer(dim=96)]
    assert prefill.prepare(shapes, exact, lambda attend, tiles: times[attend])
    assert [c.name for c in prefill._chosen.values()] == ["cudnn", "flash_attn", "cudnn"]


def test_installed_lists_libraries_that_can_be_imported():
    there = {
        "flashinfer": types.SimpleNamespace(single_prefill_with_kv_cache=None),
        "flash_attn": types.SimpleNamespace(flash_attn_func=flash_attn_func),
    }

    def find(name):
        if name not in there:
            raise ImportError(name)
        return there[name]

    names = [candidate.name for candidate in installed(find)]
    assert sorted(names) == ["cudnn", "flash_attn", "flashinfer", "torch flash"]
    there.clear()
    assert [candidate.name for candidate in installed(find)] == ["torch flash", "cudnn"]


@pytest.mark.parametrize("window", [None, 40])
def test_a_step_with_long_chunks(window):
    """The long chunk goes through the library, the short one and the decode row do not."""
    lens, rows = [40, 100, 50], [1, 60, 5]
    kv = [random_kv(length, 2, 64) for length in lens]
    tiles = Tiles(4, 2, 64, torch.int8, 32, window, lens, kv)
    library = LibraryPrefill([LIBRARIES["flash_attn"]], DEVICE, min_rows=50)
    assert library.prepare([tiles.layer], exact)
    attention = CudaAttentionLayer(tiles.layer, tiles.base, library)
    arrays = tiles.arrays(rows, 1)
    host = torch.zeros(arrays.num_words, dtype=torch.int32)
    prompts = arrays.fill(host, tiles.starts, rows, lens, 1, 66, 1, library.min_rows)
    arrays.upload(host)
    assert [tuple(p) for p in prompts] == [(tiles.starts[1], 1, 60, 100)]
    assert arrays.prompts[: arrays.num_tiles[0].item(), :3].tolist() == [[61, 5, 50]]
    q = random_q(66, 4, 64)
    out = attention.attend(arrays, q, 1, 66, True, prompts)
    for i, part in enumerate((slice(0, 1), slice(1, 61), slice(61, 66))):
        expected, _, bound = tiles.expected(q[part], i)
        # keys and values are rounded to bf16 when they are stored
        assert ((out[part].cpu().double() - expected).abs() <= 4 * bound + 0.01).all()
