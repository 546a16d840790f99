"""Which addresses may be dialled, and whom a peer may introduce."""

from __future__ import annotations

import pytest

from swarm_protocol.dials import (
    HOST_TRIES,
    INHABITED_WAIT_S,
    MAX_PROVEN,
    MINUTE_S,
    MINUTE_TRIES,
    PROOF_S,
    UNPROVEN_WAIT_S,
    Dials,
    endpoint_of,
)
from swarm_protocol.introductions import Introductions

NOW = 1_800_000_000.0
PLACE = "/ip4/192.0.2.1/tcp/80"


@pytest.mark.parametrize(
    "way",
    [
        PLACE,
        "/ip4/192.0.2.1/tcp/080",
        "/ip6/::ffff:192.0.2.1/tcp/80",
        "/ip6/::ffff:c000:201/tcp/80",
        "/ip6/0:0:0:0:0:ffff:c000:0201/tcp/80",
        "/ip6/::192.0.2.1/tcp/80",
        "/ip6/64:ff9b::c000:201/tcp/80",
        "/ip6/2002:c000:201::1/tcp/80",
        "/dns4/192.0.2.1/tcp/80",
        "/ip4/192.0.2.1/tcp/80/ws",
        "/ip4/192.0.2.1/tcp/80/p2p/relay/p2p-circuit",
    ],
)
def test_one_endpoint_has_one_spelling(way: str) -> None:
    dials = Dials()
    assert dials.take(f"{PLACE}/p2p/a", NOW)
    assert not dials.take(f"{way}/p2p/b", NOW + UNPROVEN_WAIT_S - 1)
    assert dials.refused == {"dials": 1}
    assert dials.take(f"{way}/p2p/b", NOW + UNPROVEN_WAIT_S)


def test_names_that_differ_in_case_are_one() -> None:
    assert endpoint_of("/dns4/Example.COM./tcp/1/p2p/a") == endpoint_of("/dns/example.com/tcp/1/p2p/b")


@pytest.mark.parametrize(
    "way",
    [
        "",
        "/p2p/a",
        "/memory/p2p/a",
        "/dnsaddr/example.com/p2p/a",
        "/ip4/nowhere/tcp/80/p2p/a",
        "/ip4/192.0.2.1/udp/80/quic-v1/p2p/a",
        "/ip4/192.0.2.1/tcp/70000/p2p/a",
        "/p2p/r/p2p-circuit/p2p/a",
        f"{PLACE}/p2p/r/p2p-circuit/p2p/s/p2p-circuit/p2p/a",
    ],
)
def test_an_address_without_an_endpoint_is_not_dialled(way: str) -> None:
    assert not Dials().take(way, NOW)


def test_given_and_proven_addresses_are_always_dialled() -> None:
    dials = Dials()
    dials.give(f"{PLACE}/p2p/boot")
    dials.prove("a", ["/ip4/192.0.2.9/tcp/7"], NOW)
    for i in range(1000):
        assert dials.take(f"{PLACE}/p2p/boot", NOW + i)
        assert dials.take(f"{PLACE}/p2p/boot/p2p-circuit/p2p/{i}", NOW + i)  # through a relay that is known
        assert dials.take("/ip4/192.0.2.9/tcp/7/p2p/a", NOW + i)
        assert dials.take("/ip4/192.0.2.9/tcp/8/p2p/gossip", NOW + i, owner="a")  # at a host where its peer is
        assert dials.take(f"{PLACE[:-2]}9/p2p/gossip", NOW + i, owner="boot")
    assert dials.refused.total() == 0


def test_a_proof_lets_other_ids_wait_less() -> None:
    dials = Dials()
    dials.prove("a", [PLACE], NOW)
    assert dials.take(f"{PLACE}/p2p/b", NOW)
    assert not any(dials.take(f"{PLACE}/p2p/x{i}", NOW + i) for i in range(int(INHABITED_WAIT_S)))
    assert dials.take(f"{PLACE}/p2p/b", NOW + INHABITED_WAIT_S)


@pytest.mark.parametrize(("id", "owner"), [("a", ""), ("gossip", "a")])
def test_a_proof_ends_unless_it_is_renewed(id: str, owner: str) -> None:
    dials, end = Dials(), NOW + PROOF_S + 60.0
    dials.prove("a", [PLACE], NOW)
    dials.prove("a", [PLACE], NOW + 60.0)
    assert all(dials.take(f"{PLACE}/p2p/{id}", at, owner) for at in (end - 2.0, end - 1.0))
    assert [dials.take(f"{PLACE}/p2p/{id}", end + i, owner) for i in range(600)].count(True) <= 1
    dials.prove("a", [PLACE], end + 600.0)
    assert all(dials.take(f"{PLACE}/p2p/{id}", end + 600.0, owner) for _ in range(9))


def test_proven_peers_name_few_ports_of_a_host() -> None:
    dials = Dials()
    dials.prove("a", ["/ip4/192.0.2.9/tcp/7"], NOW)
    assert sum(dials.take(f"/ip4/192.0.2.9/tcp/{i}/p2p/g{i}", NOW, owner="a") for i in range(100, 200)) == HOST_TRIES


def test_a_relayed_proof_proves_no_host() -> None:
    dials = Dials()
    dials.prove("a", [f"{PLACE}/p2p/r/p2p-circuit"], NOW)
    assert dials.take(f"{PLACE}/p2p/a", NOW) and not dials.take(f"{PLACE}/p2p/a", NOW)


def test_an_id_found_instead_is_tried() -> None:
    dials = Dials()
    assert dials.take(f"{PLACE}/p2p/made-up", NOW)
    dials.hint(f"{PLACE}/p2p/made-up", "honest", NOW)
    assert dials.hinted == {"honest"} and not dials.may(f"{PLACE}/p2p/other", NOW + 1)
    assert dials.take(f"{PLACE}/p2p/honest", NOW + 1)
    assert not dials.take(f"{PLACE}/p2p/honest", NOW + 2)


@pytest.mark.parametrize(
    "way",
    [
        "/ip4/192.0.2.1/tcp/{}/p2p/a",
        "/dns4/{}.example.com/tcp/80/p2p/a",
        "/dns4/{}.example/tcp/{}/p2p/a",
        "/ip6/2001:db8::{}/tcp/80/p2p/a",
    ],
)
def test_one_host_has_a_budget_for_its_endpoints(way: str) -> None:
    dials = Dials()
    assert sum(dials.take(way.format(i, i), NOW + i / 100) for i in range(1, 1001)) == HOST_TRIES
    assert dials.take(f"{PLACE.replace('.1/', '.2/')}/p2p/honest", NOW + 10)
    assert dials.take(way.format(2000, 2000), NOW + UNPROVEN_WAIT_S + 0.01)


def test_proofs_use_up_no_budget() -> None:
    dials = Dials()
    ways = [f"/ip4/198.51.{i // 250}.{i % 250}/tcp/80" for i in range(1000)]
    assert sum(dials.take(f"{way}/p2p/a", NOW) for way in ways) == MINUTE_TRIES
    assert not dials.take(f"{PLACE}/p2p/a", NOW + MINUTE_S - 1)
    assert dials.take(f"{PLACE}/p2p/a", NOW + MINUTE_S)
    crowd = Dials()
    for port in range(1, 1001):  # of one host, each of which answers
        assert crowd.take(f"/ip4/192.0.2.1/tcp/{port}/p2p/p{port}", NOW)
        crowd.prove(f"p{port}", [f"/ip4/192.0.2.1/tcp/{port}"], NOW)


def test_memory_of_dials_is_bounded() -> None:
    dials = Dials()
    for i in range(3 * MAX_PROVEN):
        dials.prove(f"p{i}", [f"/ip4/10.0.{i // 250}.{i % 250}/tcp/1"], NOW)
        dials.take(f"/ip4/10.9.{i // 250}.{i % 250}/tcp/1/p2p/x", NOW + i)
        dials.hint(f"/ip4/10.8.{i // 250}.{i % 250}/tcp/1/p2p/x", "y", NOW)
    assert len(dials._proven) == len(dials._inhabited) == MAX_PROVEN
    assert len(dials._tried) <= MINUTE_TRIES * UNPROVEN_WAIT_S / MINUTE_S and len(dials._hints) <= 256
    assert sum(dials._hosts.values()) == len(dials._tried)
    assert dials.take(f"{PLACE}/p2p/a", NOW - 9999) and len(dials._tried) == 1


def test_one_connection_introduces_so_many_others_and_itself() -> None:
    known = Introductions(each=3, most=5)
    assert [known.admits(f"p{i}", "liar", NOW + 60, NOW) for i in range(5)] == [True] * 3 + [False] * 2
    assert known.admits("p0", "liar", NOW + 90, NOW + 30)  # a renewal
    assert known.admits("liar", "liar", NOW + 60, NOW) and len(known) == 3
    assert [known.admits(f"q{i}", "other", NOW + 60, NOW) for i in range(3)] == [True, True, False]
    assert known.admits("late", "late", NOW + 60, NOW)
    assert known.admits("p2", "p2", NOW + 60, NOW)  # came itself: no longer on the liar's account
    assert known.admits("q2", "liar", NOW + 60, NOW)
    assert known.admits("q3", "third", NOW + 60, NOW)  # in the place of one of the liar's, which has the most
    assert [known.admits(p, "liar", NOW + 60, NOW) for p in ("p0", "p1", "q2")].count(True) == 2 and len(known) == 5
    assert known.admits("p9", "liar", NOW + 120, NOW + 61)  # the others have run out
