"""Structured output: grammars, and the token masks that are made from them.

This folder owns the compilation in a sandboxed child process and the masks of a sequence. It does
not know HTTP bodies or how a mask is applied to logits. Begin with compiler.py, then masks.py.
"""
