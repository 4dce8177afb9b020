"""Structured output: grammars, and the token masks that follow from them.

It owns compilation in a sandboxed child process and the masks' life beside a sequence. It does
not know HTTP bodies or how a mask is applied to logits. Begin with compiler.py, then masks.py.
"""
