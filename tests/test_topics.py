"""The topic scheme, and that a broker's ACL can hold it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.errors import ConfigError, WireError
from edgetrain.wire import topics
from edgetrain.wire.topics import COORDINATOR, Channel

untimed = settings(deadline=None, derandomize=True)
names = st.from_regex(r"[A-Za-z0-9_.-]{1,64}", fullmatch=True)


def matches(pattern: str, topic: str) -> bool:
    """MQTT's own matching of a topic filter."""
    wanted, given_ = pattern.split("/"), topic.split("/")
    if wanted[-1] == "#":
        wanted, given_ = wanted[:-1], given_[: len(wanted) - 1]
    return len(wanted) == len(given_) and all(
        w in ("+", g) for w, g in zip(wanted, given_, strict=True)
    )


@untimed
@given(names, names, names, st.sampled_from(Channel))
def test_an_inbox_topic_round_trips_and_only_its_owner_reads_it(ns, to, source, channel):
    topic = topics.inbox(ns, to, source, channel)
    assert topics.parse_inbox(topic) == (to, source, channel)
    for reader in (to, "someone-else"):
        for read in Channel:
            pattern = topics.inbox_filter(ns, reader, read)
            assert matches(pattern, topic) == ((reader, read) == (to, channel))


@untimed
@given(names, names)
def test_a_presence_topic_round_trips(ns, device):
    topic = topics.presence(ns, device)
    assert topics.parse_presence(topic) == device
    assert matches(topics.presence_filter(ns), topic)


@untimed
@given(names, names, names, st.sampled_from(Channel))
def test_three_acl_patterns_hold_for_every_device(me, peer, ns, channel):
    writes = (f"{ns}/up/{me}/#", f"{ns}/dev/+/from/{me}/#")
    reads = f"{ns}/dev/{me}/#"
    mine = (topics.presence(ns, me), topics.inbox(ns, peer, me, channel))
    assert all(any(matches(w, topic) for w in writes) for topic in mine)
    assert matches(reads, topics.inbox(ns, me, peer, channel))
    if me != peer:
        forged = (topics.presence(ns, peer), topics.inbox(ns, me, peer, channel))
        assert not any(matches(w, topic) for w in writes for topic in forged)
        assert not matches(reads, topics.inbox(ns, peer, me, channel))


@untimed
@given(st.text(max_size=40))
def test_other_topics_are_refused(topic):
    for parse in (topics.parse_inbox, topics.parse_presence):
        with pytest.raises(WireError):
            parse(topic)


@pytest.mark.parametrize(
    "topic",
    [
        "n/dev/a/from/b/other",
        "n/dev/a/from//data",
        "n/dev/+/from/b/data",
        "n/x/dev/a/from/b/data",
    ],
)
def test_near_misses_are_refused(topic):
    with pytest.raises(WireError):
        topics.parse_inbox(topic)


@pytest.mark.parametrize("name", ["", "a" * 65, "a/b", "+", "#", "a b", "é", "a\n", "$SYS"])
def test_names_that_would_break_a_topic_are_refused(name):
    with pytest.raises(ConfigError, match="cannot be a name"):
        topics.check_name(name)


def test_the_coordinators_name_is_its_own():
    with pytest.raises(ConfigError, match="coordinator"):
        topics.check_name(COORDINATOR)
    assert topics.check_name(COORDINATOR, allow_coordinator=True) == COORDINATOR
    assert topics.check_name("pi-5.kitchen_2") == "pi-5.kitchen_2"
