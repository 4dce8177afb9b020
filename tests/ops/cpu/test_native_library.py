"""The native library as a guest of a process: threads, forks, concurrent callers, refusals."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from ops import Fusion, Norm
from ops.backend import MAX_INT8_INPUTS
from ops.cpu import native_library
from ops.cpu.native_quantized_linear import Int8Linear
from tests.support.engine.child import output_of

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.usefixtures("seeded"),
]


def test_threads_are_limited_to_the_processors():
    before = native_library.num_threads()
    native_library.set_num_threads(10_000)
    assert native_library.num_threads() <= len(os.sched_getaffinity(0))
    native_library.set_num_threads(1)
    assert native_library.num_threads() == 1
    assert Int8Linear(torch.randn(64, 64), None)(torch.randn(3, 64)).shape == (3, 64)
    native_library.set_num_threads(before)
    assert native_library.num_threads() == before


FORKED = """
import os, sys, time, torch
from ops.cpu import native_library
from ops.cpu.native_quantized_linear import Int8Linear
torch.set_num_threads(1)  # libgomp does not survive a fork; our team has to
layer, x = Int8Linear(torch.ones(4096, 64), None), torch.ones(64, 64)
expected = layer(x)
time.sleep(0.05)  # the helpers sleep
child = os.fork()
if child == 0:
    native_library.set_num_threads(2)
    for _ in range(3):
        assert torch.equal(layer(x), expected)
        time.sleep(0.01)
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert torch.equal(layer(x), expected)
"""


def test_a_forked_child_computes_alone():
    """A forked child has none of the pool's threads and must not wait for them."""
    output_of("-c", FORKED)


KEPT = """
import ctypes
from ops.cpu import native_library
index = native_library.library().SuffixIndex()
ctypes.pythonapi.Py_IncRef(ctypes.py_object(index))  # as the frame of a thread holds it
"""


def test_what_is_alive_when_the_process_ends_is_not_reported():
    """A server that is stopped after a request has such objects, and tells nobody of them."""
    done = subprocess.run(
        [sys.executable, "-c", KEPT], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stderr == ""


def test_two_callers_at_once():
    """One caller gets the thread pool and the other works alone, and both results are right."""
    layers = [Int8Linear(torch.randn(500, 128), None) for _ in range(2)]
    x = torch.randn(40, 128)
    expected = [layer(x) for layer in layers]
    wrong: list[int] = []

    def call(index: int) -> None:
        for _ in range(300):
            if not torch.equal(layers[index](x), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=call, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_arguments_out_of_bounds_are_refused():
    assert MAX_INT8_INPUTS * 127 * 128 < 2**31
    with pytest.raises(ValueError, match="132,104"):
        Int8Linear(torch.ones(32, MAX_INT8_INPUTS + 1), None)
    x = torch.randn(2, 64)
    with pytest.raises(AssertionError):
        Int8Linear(torch.ones(40, 64), torch.ones(1))
    with pytest.raises(AssertionError):
        Int8Linear(torch.ones(40, 64), None, Fusion(Norm("rms", torch.ones(8), None, 1e-5)))
    with pytest.raises(AssertionError):
        Int8Linear(torch.ones(40, 64), None)(x, torch.ones(40, 2).T)
    with pytest.raises(AssertionError):
        Int8Linear(torch.ones(41, 64), None, Fusion(None, "silu", True))
    with pytest.raises(AssertionError):
        Int8Linear(torch.ones(40, 64), None, Fusion(None, "silu", True))(x, torch.ones(2, 20))


def test_python_runs_while_a_kernel_runs():
    layer, x = Int8Linear(torch.ones(4096, 4096), None), torch.ones(2048, 4096)
    ticks: list[float] = []
    is_done = threading.Event()

    def tick() -> None:
        while not is_done.wait(0.001):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.perf_counter()
    layer(x)
    ended = time.perf_counter()
    is_done.set()
    thread.join()
    margin = 0.1 * (ended - began)
    assert any(began + margin < at < ended - margin for at in ticks)


def test_unknown_instruction_sets_are_refused():
    assert not native_library.library().choose_instruction_set("mmx")
