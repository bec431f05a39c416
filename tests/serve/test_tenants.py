"""Who requests take turns as: their API key, or the address that they come from."""

from collections.abc import Callable

import httpx
import pytest
from fake_engine import FakeEngine

from shadowkv.serve.http.owners import tenant_of_address


@pytest.mark.parametrize(
    ("client", "tenant"),
    [
        (("192.0.2.7", 4711), "192.0.2.7"),
        (("::ffff:192.0.2.7", 4711), "192.0.2.7"),
        (("2001:db8:1:2:3:4:5:6", 4711), "2001:db8:1:2::"),
        (("2001:db8:1:2:ffff::1", 4711), "2001:db8:1:2::"),
        (("fe80::1%eth0", 4711), "fe80::"),
        (("testclient", 50000), "testclient"),
        (None, ""),
    ],
)
def test_an_address_is_a_tenant_and_of_ipv6_its_network(client: tuple[str, int] | None, tenant: str) -> None:
    assert tenant_of_address({"type": "http", "client": client}) == tenant


def test_a_scope_without_a_client_has_the_tenant_without_a_name() -> None:
    assert tenant_of_address({"type": "http"}) == ""


def test_a_priority_needs_a_server_that_goes_by_it(post: Callable[..., httpx.Response], engine: FakeEngine) -> None:
    refused = post("completions", prompt="Hi", priority=-3)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "priority"
    assert "--scheduling-policy priority, this one has fair" in refused.json()["error"]["message"]
    assert post("completions", prompt="Hi", priority=0).status_code == 200
    engine.scheduling_policy = "priority"
    assert post("completions", prompt="Hi", priority=-3).status_code == 200
