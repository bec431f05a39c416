"""Who requests take turns as: their API key, or the address that they come from."""

import pytest

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
