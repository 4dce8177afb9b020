"""llama.cpp over a mixture that is mapped, with memory for some of its experts.

    LLAMA_PYTHON -m bench.streaming.mapped_experts MODEL.gguf < job.json

LLAMA_PYTHON has llama-cpp-python, gguf and numpy; LLAMA_CPP_LIB_PATH may name another build of its
library. A job is what run.py made: sequences (prompts with the tokens that were answered), prompt
(the tokens of each prompt), experts (how many there is memory for), start (those that are there).

llama.cpp reads the experts by page faults, as with a limit on its memory. What a limit would drop
is dropped here, whole experts at a time: when a layer's router has chosen, a policy names those
that stay, and the pages of all others are dropped (madvise with MADV_PAGEOUT, posix_fadvise). Two
policies are measured: LRU, about what a system does, and the oracle, which knows the future, so
that no system can drop better. It is in favour of llama.cpp: what is no expert always stays,
dropping is not counted as time, and the tokens are given, so that it need not draw them.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.streaming.expert_memory import Access, Expert, Lru, Memory, Oracle

_PAGEOUT = 21
_PAGE = mmap.PAGESIZE
_CHOICE = b"ffn_moe_topk-"
_MATRICES = ("gate", "up", "down")
_WARM_STEPS = 2
_LEFT, _TRIES = 0.01, 5  # of what was dropped


class Choice(ctypes.Structure):
    """The beginning of a ggml_tensor."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
    )


class MappedExperts:
    """The pages of each expert in this process."""

    def __init__(self, path: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
        self._path, self._fd = path, os.open(path, os.O_RDONLY)
        self._maps: list[tuple[int, int, int]] = []  # first address, end, offset in the file
        for line in Path("/proc/self/maps").read_text().splitlines():
            if line.endswith(str(path)):
                span, _, offset = line.split()[:3]
                first, _, end = span.partition("-")
                self._maps.append((int(first, 16), int(end, 16), int(offset, 16)))
        # of each expert, the address, the offset in the file and the bytes of its pages
        self.ranges: dict[Expert, list[tuple[int, int, int]]] = {}
        gguf: Any = importlib.import_module("gguf")
        for tensor in gguf.GGUFReader(path).tensors:
            parts = tensor.name.split(".")
            if parts[0] == "blk" and parts[2] in [f"ffn_{name}_exps" for name in _MATRICES]:
                count = int(tensor.shape[-1])
                size = int(tensor.n_bytes) // count
                for expert in range(count):
                    start = int(tensor.data_offset) + expert * size
                    found = self.ranges.setdefault((int(parts[1]), expert), [])
                    found.append(self._pages(start, start + size))

    def _pages(self, start: int, end: int) -> tuple[int, int, int]:
        """Returns the whole pages between two bytes of the file."""
        start, end = -(-start // _PAGE) * _PAGE, end // _PAGE * _PAGE
        for first, last, offset in self._maps:
            if offset <= start and end <= offset + last - first:
                return first + start - offset, start, end - start
        raise SystemExit(f"{self._path} is not mapped as it is in the file")

    def num_bytes(self, experts: Iterable[Expert]) -> int:
        return sum(size for name in experts for _, _, size in self.ranges[name])

    def keep(self, experts: Container[Expert]) -> None:
        """Drops the pages of all others, also of those that were read ahead."""
        for name, ranges in self.ranges.items():
            if name in experts:
                continue
            for address, start, size in ranges:
                if self._libc.madvise(address, size, _PAGEOUT):
                    raise OSError(ctypes.get_errno(), "madvise")
                os.posix_fadvise(self._fd, start, size, os.POSIX_FADV_DONTNEED)

    def read(self, experts: Iterable[Expert]) -> None:
        """Reads the pages that are not in memory."""
        for name in experts:
            for address, _, size in self.ranges[name]:
                for at in range(address, address + size, _PAGE):
                    ctypes.c_ubyte.from_address(at).value  # noqa: B018  # it is a page fault

    def resident_bytes(self, experts: Iterable[Expert]) -> int:
        """Returns how much of these experts is in memory, mapped or not."""
        total = 0
        for name in experts:
            for address, _, size in self.ranges[name]:
                pages = ctypes.create_string_buffer(size // _PAGE)
                if self._libc.mincore(address, size, pages):
                    raise OSError(ctypes.get_errno(), "mincore")
                total += sum(page & 1 for page in pages.raw) * _PAGE
        return total


class Llama:
    """A model of llama.cpp. is_watched: it tells which experts a layer has chosen before it uses
    them."""

    def __init__(
        self, path: Path, threads: int, requests: int, length: int, *, is_watched: bool = True
    ) -> None:
        self.lib: Any = importlib.import_module("llama_cpp.llama_cpp")
        lib = self.lib
        lib.llama_backend_init()
        quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
        self._log = quiet(lambda *_: None)
        lib.llama_log_set(ctypes.cast(self._log, lib.llama_log_callback), None)
        params = lib.llama_model_default_params()
        params.load_mode = lib.LLAMA_LOAD_MODE_MMAP
        params.use_extra_bufts = False  # weights stay as they are in the file
        self._model = lib.llama_model_load_from_file(str(path).encode(), params)
        context = lib.llama_context_default_params()
        # as little memory as there can be: requests share the K/V
        context.n_ctx, context.n_seq_max = max(512, length * requests), requests
        context.kv_unified = True
        context.n_batch = context.n_ubatch = max(32, length * requests)
        context.n_threads = context.n_threads_batch = threads
        self._callback = lib.ggml_backend_sched_eval_callback(self._evaluated)
        if is_watched:
            context.cb_eval = self._callback
        self._context = lib.llama_init_from_model(self._model, context)
        if not self._context:
            raise SystemExit(f"llama.cpp does not load {path}")
        self.on_use: Callable[[int, list[int]], None] = lambda mixture, experts: None
        self._error: Exception | None = None
        get_name = lib._lib.ggml_get_name
        get_name.restype, get_name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
        get_data = lib._lib.ggml_get_data
        get_data.restype, get_data.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        self._name_of, self._data_of = get_name, get_data

    def _evaluated(self, tensor: int, ask: bool, _: object) -> bool:
        address = ctypes.cast(tensor, ctypes.c_void_p).value
        name: bytes = self._name_of(address)
        if not name.startswith(_CHOICE):
            return not ask
        if not ask:
            assert address is not None
            choice = Choice.from_address(address)
            data = self._data_of(address)
            found = {
                ctypes.c_int32.from_address(data + k * choice.nb[0] + row * choice.nb[1]).value
                for k in range(choice.ne[0])
                for row in range(choice.ne[1])
            }
            try:
                self.on_use(int(name[len(_CHOICE) :]), sorted(found))
            except Exception as error:  # it would be lost behind the library
                self._error = error
                return False
        return True

    def answer(self, sequences: Sequence[Sequence[int]], prompt: int) -> float:
        """Computes the sequences, their prompts in one step and then token by token. Returns the
        seconds."""
        lib = self.lib
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        began = time.perf_counter()
        self._step([sequence[:prompt] for sequence in sequences], 0)
        for at in range(prompt, len(sequences[0]) - 1):
            self._step([sequence[at : at + 1] for sequence in sequences], at)
        return time.perf_counter() - began

    def _step(self, parts: Sequence[Sequence[int]], first: int) -> None:
        lib, count = self.lib, sum(map(len, parts))
        batch = lib.llama_batch_init(count, 0, 1)
        batch.n_tokens, row = count, 0
        for number, part in enumerate(parts):
            for place, token in enumerate(part):
                batch.token[row], batch.pos[row] = token, first + place
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, number
                batch.logits[row] = place == len(part) - 1
                row += 1
        failed = lib.llama_decode(self._context, batch)
        lib.llama_batch_free(batch)
        if self._error is not None:
            raise self._error
        if failed:
            raise SystemExit(f"llama.cpp cannot compute: {failed}")


def read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def begin_with(mapped: MappedExperts, kept: set[Expert]) -> None:
    """Brings these experts into memory, whatever was measured before, and drops all others."""
    away = mapped.ranges.keys() - kept
    for _ in range(_TRIES):
        mapped.read(kept)
        mapped.keep(kept)  # also what was read ahead
        is_away = mapped.resident_bytes(away) <= _LEFT * mapped.num_bytes(away)
        if is_away and mapped.resident_bytes(kept) >= (1 - _LEFT) * mapped.num_bytes(kept):
            return
    raise SystemExit("the weights do not stay where they should")


def limited(
    llama: Llama, mapped: MappedExperts, job: dict[str, Any], memory: Memory
) -> dict[str, float]:
    """Measures the sequences with only so many experts in memory."""
    begin_with(mapped, memory.kept)
    dropping = 0.0

    def on_use(mixture: int, experts: list[int]) -> None:
        nonlocal dropping
        began = time.perf_counter()
        memory.use(mixture, experts)
        mapped.keep(memory.kept)
        dropping += time.perf_counter() - began

    llama.on_use = on_use
    before = read_bytes()
    seconds = llama.answer(job["sequences"], job["prompt"]) - dropping
    return {
        "seconds": seconds,
        "dropping": dropping,
        "read": read_bytes() - before,
        "hits": memory.hits / max(1, memory.uses),
    }


def measure(path: Path, threads: int, job: dict[str, Any]) -> dict[str, Any]:
    """Measures a job with all experts in memory, and with LRU and the oracle dropping them."""
    sequences, prompt = job["sequences"], job["prompt"]
    llama = Llama(path, threads, len(sequences), len(sequences[0]))
    mapped = MappedExperts(path)
    trace: list[Access] = []
    llama.answer([sequence[: prompt + _WARM_STEPS] for sequence in sequences], prompt)
    llama.on_use = lambda mixture, experts: trace.append((mixture, experts))
    in_memory = llama.answer(sequences, prompt)
    size, start = job["experts"], [(mixture, expert) for mixture, expert in job["start"]]
    return {
        "memory": {"seconds": in_memory},
        "lru": limited(llama, mapped, job, Lru(size, start)),
        "oracle": limited(llama, mapped, job, Oracle(size, start, trace)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    print(json.dumps(measure(args.gguf.resolve(), args.threads, json.load(sys.stdin))))


if __name__ == "__main__":
    main()
