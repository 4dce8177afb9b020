"""Peak rates of this machine on the native kernels, for benchmarks."""

from __future__ import annotations

from torch import Tensor

from ops.cpu.native_library import library


class Ceilings:
    """Peak rates of this machine, as a reference for benchmarks."""

    @staticmethod
    def read(buffer: Tensor) -> None:
        """Reads all bytes of a dense tensor once with all threads."""
        library().read_bytes(buffer.data_ptr(), buffer.numel() * buffer.element_size())

    @staticmethod
    def copy(to: Tensor, source: Tensor) -> None:
        """Copies all bytes of a dense tensor with all threads."""
        size_bytes = source.numel() * source.element_size()
        assert to.numel() * to.element_size() >= size_bytes
        library().copy_bytes(to.data_ptr(), source.data_ptr(), size_bytes)

    @staticmethod
    def multiply_i8(rounds: int) -> float:
        """Multiplies int8 registers; returns the number of operations, two per multiply-add."""
        return float(library().multiply_i8(rounds))

    @staticmethod
    def multiply_f32(rounds: int) -> float:
        """Multiplies and adds fp32 registers; returns the number of operations."""
        return float(library().multiply_f32(rounds))

    @staticmethod
    def multiply_bf16(rounds: int) -> float:
        """Multiplies bf16 registers; returns 0 if the processor has no such instruction."""
        return float(library().multiply_bf16(rounds))
