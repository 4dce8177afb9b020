"""The setting kv_policy."""

from __future__ import annotations

import pytest

from memory.policies.setting import LEAST_TOKENS as LEAST
from memory.policies.setting import POLICIES, KVPolicy, parse_kv_policy


def test_policies_have_a_budget_in_tokens_or_as_a_share() -> None:
    assert parse_kv_policy("off") is None
    for name in POLICIES:
        assert parse_kv_policy(f"{name}:budget=512") == KVPolicy(name, tokens=512)
        assert parse_kv_policy(f"{name}:budget=12.5%") == KVPolicy(name, share=0.125, least=LEAST)
        text = f"{name}:budget=12.5%,least=3"
        assert parse_kv_policy(text) == KVPolicy(name, share=0.125, least=3)


def test_few_tokens_are_meant_where_least_says_so() -> None:
    assert parse_kv_policy("quest:budget=64") == KVPolicy("quest", tokens=64)
    for text in ("quest:budget=25,least=1", "quest:budget=25,least=25"):
        assert parse_kv_policy(text) == KVPolicy("quest", tokens=25)


def test_different_policies_have_different_keys() -> None:
    texts = (
        "quest:budget=128",
        "h2o:budget=128",
        "quest:budget=50%",
        "quest:budget=50%,least=64",
        "quest:budget=50.000001%",
    )
    policies = [parse_kv_policy(text) for text in texts]
    assert len({policy.key for policy in policies if policy is not None}) == len(texts)
    same = parse_kv_policy("quest:budget=50%,least=128")
    assert same == policies[2] and same is not None and same.key == policies[2].key  # type: ignore[union-attr]


def test_a_share_of_a_sequence_is_rounded_up() -> None:
    policy = KVPolicy("h2o", share=0.12)
    assert [policy.budget(n) for n in (1, 100, 101)] == [1, 12, 13]
    assert KVPolicy("h2o", tokens=64).budget(1000) == 64


def test_a_share_of_a_short_sequence_is_a_number_of_tokens() -> None:
    policy = parse_kv_policy("quest:budget=12%")
    assert policy is not None
    assert [policy.budget(n) for n in (1, 1000, 2000)] == [LEAST, LEAST, 240]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (None, "None"),
        ("", "''"),
        ("best:budget=1", "'best'"),
        ("quest", "needs a budget"),
        ("quest:", "needs a budget"),
        ("quest:size=3", "needs a budget"),
        ("quest:budget=", "''"),
        ("quest:budget=0", "'0'"),
        ("quest:budget=-1", "'-1'"),
        ("quest:budget=0%", "'0%'"),
        ("quest:budget=101%", "'101%'"),
        ("quest:budget=nan%", "'nan%'"),
        ("quest:budget=1.5", "'1.5'"),
        ("quest:budget=1,x=2", "'1,x=2'"),
        ("quest:budget=1,least=2", "'1,least=2'"),
        ("quest:budget=25", "did you mean quest:budget=25%"),
        ("h2o:budget=63", "h2o:budget=63,least=1"),
        ("quest:budget=25,least=", "'25,least='"),
        ("quest:budget=1%,", "'1%,'"),
        ("quest:budget=1%,most=2", "'1%,most=2'"),
        ("quest:budget=1%,least=0", "'1%,least=0'"),
        ("quest:budget=1%,least=all", "'1%,least=all'"),
        ("quest:budget=1_0%", "'1_0%'"),
        ("quest:budget=1_00", "'1_00'"),
        ("quest:budget=+25%", "'+25%'"),
        ("quest:budget=+128", "'+128'"),
        ("quest:budget=12 %", "'12 %'"),
        ("quest:budget= 128", "' 128'"),
        ("quest:budget=\uff11\uff12%", "'\uff11\uff12%'"),
        ("quest:budget=\uff11\uff12\uff18", "'\uff11\uff12\uff18'"),
        ("quest:budget=25%,least=+1", "'25%,least=+1'"),
    ],
)
def test_anything_else_is_refused(text: object, wrong: str) -> None:
    with pytest.raises(ValueError, match=r"must be|needs|must have|has a") as caught:
        parse_kv_policy(text)
    assert wrong in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "quest:budget=12.5%",
        "h2o:budget=25%,least=16",
        "quest:budget=32,least=1",
        "snapkv:budget=64",
        "quest:budget=1e-05%",
    ],
)
def test_the_setting_of_a_policy_gives_it_again(text: str) -> None:
    policy = parse_kv_policy(text)
    assert policy is not None
    assert policy.setting == text
