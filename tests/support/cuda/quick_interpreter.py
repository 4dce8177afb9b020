"""Makes Triton's interpreter more than twice as fast, with the same results.

For each operation of a kernel it calls numpy once; most of its time goes into types and shapes.
What it makes anew each time is kept here: the functions of its language that it replaces, types of
blocks, shapes of tensors, numpy's types. What it computes and then drops is left out: the check of
integers for overflows, whose result is read only if `debug` is on.
"""

from __future__ import annotations

import inspect
import math
import sys
from functools import cache
from typing import Any

_KNOWN = "3.9."  # the version whose interpreter is known here; others are left as they are


def quicken() -> None:
    """Does nothing where no kernel has been defined, or where Triton has another version."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is not None:
        _quicken(interpreter)


@cache
def _quicken(interpreter: Any) -> None:
    import triton

    if triton.__version__.startswith(_KNOWN):
        _keep_builtins(interpreter)
        _patch_once(interpreter)
        _keep_types(interpreter)
        _leave_out_unread_checks(interpreter)


def _keep_builtins(interpreter: Any) -> None:
    """It looks through all names of its language whenever a kernel calls a function. They do not
    change, so that the first look is enough."""
    from triton import language

    is_builtin = language.core.is_builtin

    @cache
    def builtins_of(package: Any) -> tuple[str, ...]:
        """Returns the names to replace, from the first call, when none has been replaced."""
        return tuple(name for name in dir(package) if is_builtin(getattr(package, name, None)))

    def patch(package: Any, builder: Any, scope: Any) -> None:
        for name in builtins_of(package):
            member = getattr(package, name)
            if is_builtin(member):
                scope.set_attr(package, name, call_of(member))

    semantic = interpreter.interpreter_semantic

    @cache
    def call_of(member: Any) -> Any:
        function = getattr(member, "__wrapped__", member)  # one that does not look for _semantic

        def call(*args: Any, **given: Any) -> Any:
            given["_semantic"] = semantic
            return function(*args, **given)

        return call

    interpreter._patch_builtin = patch


def _patch_once(interpreter: Any) -> None:
    """A function that a kernel calls replaces what the kernel's launch has replaced already."""
    from triton import language

    patch, patched = interpreter._patch_lang, set[Any]()

    @cache
    def languages_of(function: Any) -> frozenset[Any]:
        modules = [each for each in function.__globals__.values() if inspect.ismodule(each)]
        return frozenset(each for each in modules if each in (language, language.core))

    def is_patched(module: Any) -> bool:
        return module in patched and not isinstance(module.range, type)  # the language's is a class

    def patch_lang(function: Any) -> Any:
        languages = languages_of(function)
        if languages and all(map(is_patched, languages)):
            return interpreter._LangPatchScope()
        scope = patch(function)
        patched.update(languages)
        restore = scope.restore

        def restore_all() -> None:
            patched.clear()
            restore()

        scope.restore = restore_all  # of a launch; called functions restore nothing
        return scope

    interpreter._patch_lang = patch_lang


def _keep_types(interpreter: Any) -> None:
    """Types of blocks, shapes of tensors and numpy's types are made once for each kind."""
    from triton.language import core

    block_type, numpy_of = core.block_type, interpreter._get_np_dtype

    @cache
    def kept_block(element: Any, shape: tuple[int, ...]) -> Any:
        return block_type(element, list(shape))

    @cache
    def numpy_of_scalar(element: Any) -> Any:
        return numpy_of(element)

    @cache
    def size_of(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.constexpr(math.prod(shape)), core.tuple(
            [core.constexpr(each) for each in shape]
        )

    def block_of(element: Any, shape: Any) -> Any:
        if type(element) is not core.dtype:  # pointers have no hash
            return block_type(element, list(shape))
        return kept_block(element, tuple(shape))

    def numpy_type(kind: Any) -> Any:
        element = kind.element_ty if isinstance(kind, block_type) else kind
        return numpy_of(element) if element.is_ptr() else numpy_of_scalar(element)

    def init(tensor: Any, handle: Any, kind: Any) -> None:
        tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
        tensor.numel, tensor.shape = size_of(tuple(kind.shape) if kind.is_block() else ())

    is_equal, unwrap = core.dtype.__eq__, core._unwrap_if_constexpr
    plain = frozenset({core.dtype, core.tensor, core.block_type, int, float, bool, str, type(None)})
    semantic = type(interpreter.interpreter_semantic)
    broadcast = semantic.broadcast_impl_value

    def broadcast_value(self: Any, one: Any, other: Any) -> Any:
        kind, other_kind = one.type, other.type
        are_blocks = kind.is_block() and other_kind.is_block()
        if are_blocks and kind.shape.values == other_kind.shape.values:
            return one, other
        return broadcast(self, one, other)

    interpreter._get_np_dtype = numpy_type
    core.dtype.__eq__ = lambda self, other: self is other or is_equal(self, other)
    core._unwrap_if_constexpr = lambda value: value if type(value) in plain else unwrap(value)
    block_type.with_element_ty = lambda self, element: block_of(element, self.shape)
    interpreter.InterpreterBuilder.get_block_ty = lambda _, of, shape: block_of(of, shape)
    core.tensor.__init__ = init
    semantic.broadcast_impl_value = broadcast_value


def _leave_out_unread_checks(interpreter: Any) -> None:
    semantic = type(interpreter.interpreter_semantic)
    check = semantic.binary_op_sanitize_overflow_impl

    def checked(self: Any, *operands: Any) -> None:
        if self.builder.options.debug:
            check(self, *operands)

    semantic.binary_op_sanitize_overflow_impl = checked
