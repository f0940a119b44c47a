"""Keys: one hash tag for all that one script touches, and a job's keys from its id alone."""

from __future__ import annotations

import re

import pytest

from shared.keys import LANES, Keys, is_job_id, new_job_id, tag, tag_of

KEYS = Keys("p")


def _hash_tag(key: str) -> str:
    found = re.search(r"\{([^}]+)\}", key)
    assert found is not None, key
    return found.group(1)


def test_a_tag_is_hexadecimal_and_differs_by_pool_and_shard() -> None:
    tags = {tag(pool, shard) for pool in ("a", "b", "ü/ß") for shard in (0, 1, 255)}
    assert len(tags) == 9
    assert all(re.fullmatch(r"[0-9a-f]{10}", one) for one in tags)
    assert tag("a", 255).endswith("ff")


def test_a_tag_never_changes() -> None:
    """Processes of different versions must find the same keys."""
    assert tag("Qwen/Qwen3-8B", 0) == "2c4f79de00"
    assert tag("Qwen/Qwen3-8B", 17) == "2c4f79de11"


def test_a_job_id_holds_its_tag_and_cannot_be_guessed() -> None:
    job_tag = tag("a", 3)
    ids = {new_job_id(job_tag) for _ in range(1000)}
    assert len(ids) == 1000
    assert all(is_job_id(one) and tag_of(one) == job_tag for one in ids)


@pytest.mark.parametrize(
    "text",
    ["", "0" * 31, "0" * 33, "g" * 32, "A" * 32, "0" * 31 + "{", "\uff10" * 32, "0" * 31 + "\n"],
)
def test_what_is_no_job_id_is_told(text: str) -> None:
    assert not is_job_id(text)


def test_everything_that_one_script_touches_shares_a_hash_tag() -> None:
    job_tag = tag("a", 0)
    job_id = new_job_id(job_tag)
    names = [KEYS.job(job_id), KEYS.log(job_id), KEYS.cancel(job_id), KEYS.channel(job_id)]
    names += [key(job_tag, lane) for lane in LANES for key in (KEYS.lane, KEYS.returned)]
    names += [key(job_tag, lane) for lane in LANES for key in (KEYS.tenants, KEYS.bell)]
    names += [KEYS.bell(job_tag, lane, returned=True) for lane in LANES]
    names += [KEYS.tenant(job_tag, lane, "t") for lane in LANES]
    names.append(KEYS.control(job_tag, "w"))
    assert {_hash_tag(name) for name in names} == {job_tag}
    assert len(set(names)) == len(names)
    assert len({_hash_tag(n) for n in (KEYS.workers(), KEYS.worker("w"), KEYS.models())}) == 1


def test_every_key_begins_with_the_prefix() -> None:
    names = [KEYS.job("0" * 32), KEYS.workers(), KEYS.lane("0" * 10, "batch"), KEYS.models()]
    assert all(name.startswith("p:") for name in names)
    assert KEYS.job("0" * 32) != Keys("q").job("0" * 32)


def test_what_scripts_make_of_a_streams_name_are_the_keys() -> None:
    """The scripts append to the streams that they are given."""
    job_tag = tag("a", 0)
    lane, returned = KEYS.lane(job_tag, "batch"), KEYS.returned(job_tag, "batch")
    assert KEYS.tenants(job_tag, "batch") == lane + ":tenants"
    assert KEYS.tenant(job_tag, "batch", "t") == lane + ":tenant:t"
    assert KEYS.bell(job_tag, "batch") == lane + ":bell"
    assert KEYS.bell(job_tag, "batch", returned=True) == returned + ":bell"


def test_the_control_prefix_and_a_worker_make_its_channel() -> None:
    """The cancel script joins them, so the one must be the beginning of the other."""
    assert KEYS.control("t" * 10, "") + "w-1" == KEYS.control("t" * 10, "w-1")
