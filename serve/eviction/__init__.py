"""Sequences that drop K/V while they run (kv_policy): the scheduler that tells them when.

memory/policies decides what stays, memory/attention/evicting.py scores and moves it, and
memory/evicting_kv.py accounts for the pages.
"""
