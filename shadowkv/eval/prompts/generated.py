"""Logs and tables, made up from a seed: texts that are neither prose nor code, for the suites ``fidelity`` and
``open-ended``.

All lines have one of a few forms and differ in names and numbers. So attention must tell thousands of similar keys
apart.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta

SECTION = 60
"""Number of lines of a log file, and number of rows of a table."""
START = datetime(2026, 3, 1, 6, 0, 0)

METHODS = ("GET", "GET", "GET", "POST", "PUT", "DELETE")
PATHS = ("api/v1/orders", "api/v1/users", "api/v2/search", "static/js", "images", "cart", "login", "reports", "health")
STATUSES = (200, 200, 200, 200, 201, 204, 301, 304, 401, 403, 404, 429, 500, 502)
AGENTS = (
    "Mozilla/5.0 (X11; Linux x86_64; rv:128.0) Gecko/20100101 Firefox/128.0",
    "Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36",
    "curl/8.5.0",
    "python-requests/2.32.3",
    "kube-probe/1.29",
)
NETWORKS = ("192.0.2", "198.51.100", "203.0.113")
"""The first three bytes of networks that are reserved for documentation (RFC 5737)."""
HOSTS = ("web-01", "web-02", "db-01", "cache-03", "mail-02", "build-07")
USERS = ("deploy", "backup", "admin", "postgres", "anna", "tomas", "svc-metrics")
DEVICES = ("eth0", "eth1", "sda", "sdb", "nvme0n1", "md127")

CITIES = ("Lisbon", "Oslo", "Kyoto", "Quito", "Dakar", "Perth", "Riga", "Turin", "Cork", "Izmir", "Lima", "Austin")
NAMES = ("Ana", "Bo", "Chidi", "Dana", "Emre", "Farah", "Goran", "Hana", "Ivo", "Jun", "Kofi", "Lena", "Mira", "Noor")
PRODUCTS = ("lamp", "desk", "chair", "kettle", "router", "drill", "tent", "clock", "scale", "pump", "cable", "valve")
STATES = ("open", "paid", "shipped", "returned", "cancelled")


def logs(seed: str, characters: int) -> str:
    """Returns at least ``characters`` characters of log files: access logs of web servers in the combined log format,
    and syslogs. Each file has a header with its name, and ``SECTION`` lines.

    A ``seed`` gives the same text in every process. More ``characters`` only add lines.
    """
    return _text(_log_lines(random.Random(f"logs/{seed}")), characters)


def tables(seed: str, characters: int) -> str:
    """Returns at least ``characters`` characters of tables, CSV and Markdown in turn. Each has a title and ``SECTION``
    rows.

    A ``seed`` gives the same text in every process. More ``characters`` only add rows.
    """
    return _text(_table_lines(random.Random(f"tables/{seed}")), characters)


def _text(lines: Iterator[str], characters: int) -> str:
    """Returns the first lines that together have at least ``characters`` characters."""
    parts: list[str] = []
    while characters > 0:
        parts.append(next(lines) + "\n")
        characters -= len(parts[-1])
    return "".join(parts)


def _log_lines(rng: random.Random) -> Iterator[str]:
    now = START
    while True:
        for path, make in (("nginx/access.log", _access), ("syslog", _syslog)):
            host = rng.choice(HOSTS)
            yield f"==> {host}:/var/log/{path} <=="
            for _ in range(SECTION):
                now += timedelta(seconds=rng.expovariate(1 / 3))
                yield make(now, host, rng)
            yield ""


def _access(now: datetime, host: str, rng: random.Random) -> str:
    path = f"/{rng.choice(PATHS)}/{rng.randrange(100_000)}"
    query = f"?page={rng.randrange(1, 40)}" if rng.random() < 0.3 else ""
    referrer = "-" if rng.random() < 0.5 else f"https://shop.example.com/{rng.choice(PATHS)}"
    request = f'"{rng.choice(METHODS)} {path}{query} HTTP/1.1" {rng.choice(STATUSES)} {rng.randrange(120, 90_000)}'
    return f'{_address(rng)} - - [{now:%d/%b/%Y:%H:%M:%S} +0000] {request} "{referrer}" "{rng.choice(AGENTS)}"'


def _syslog(now: datetime, host: str, rng: random.Random) -> str:
    messages: tuple[Callable[[], str], ...] = (
        lambda: (
            f"sshd[{rng.randrange(900, 32_000)}]: Accepted publickey for {rng.choice(USERS)} from {_address(rng)} "
            f"port {rng.randrange(1024, 65_000)} ssh2"
        ),
        lambda: (
            f"sshd[{rng.randrange(900, 32_000)}]: Failed password for invalid user {rng.choice(USERS)} "
            f"from {_address(rng)} port {rng.randrange(1024, 65_000)} ssh2"
        ),
        lambda: f"CRON[{rng.randrange(900, 32_000)}]: ({rng.choice(USERS)}) CMD (/usr/local/bin/rotate --keep 7)",
        lambda: (
            f"kernel: [{rng.uniform(1e3, 9e5):.6f}] {rng.choice(DEVICES)}: link is down, retry {rng.randrange(1, 9)}"
        ),
        lambda: (
            f"postgres[{rng.randrange(900, 32_000)}]: LOG: duration: {rng.uniform(0.1, 4e3):.3f} ms "
            f"statement: SELECT * FROM orders WHERE id = {rng.randrange(100_000)}"
        ),
        lambda: f"systemd[1]: Started session-{rng.randrange(10_000)}.scope of user {rng.choice(USERS)}.",
        lambda: (
            f"kernel: [{rng.uniform(1e3, 9e5):.6f}] Out of memory: killed process {rng.randrange(900, 32_000)} "
            f"(worker), total-vm:{rng.randrange(10**5, 10**7)}kB"
        ),
    )
    return f"{now:%b %d %H:%M:%S} {host} {rng.choice(messages)()}"


def _address(rng: random.Random) -> str:
    return f"{rng.choice(NETWORKS)}.{rng.randrange(1, 255)}"


def _table_lines(rng: random.Random) -> Iterator[str]:
    number = 0
    while True:
        for row in (_csv, _markdown):
            for title, columns, values in TABLES:
                number += 1
                yield f"Table {number}: {title}, {rng.choice(CITIES)}, {START + timedelta(days=number):%d %B %Y}"
                yield row(columns)
                if row is _markdown:
                    yield row(("---",) * len(columns))
                for _ in range(SECTION):
                    yield row(values(rng))
                yield ""


def _csv(cells: tuple[str, ...]) -> str:
    return ",".join(cells)


def _markdown(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def _order(rng: random.Random) -> tuple[str, ...]:
    price, count = rng.randrange(150, 90_000) / 100, rng.randrange(1, 30)
    day = START + timedelta(days=rng.randrange(365))
    product = rng.choice(PRODUCTS)
    sums = (f"{price:.2f}", str(count), f"{price * count:.2f}")
    return (
        str(rng.randrange(10_000, 100_000)),
        f"{day:%Y-%m-%d}",
        rng.choice(NAMES),
        product,
        *sums,
        rng.choice(STATES),
    )


def _reading(rng: random.Random) -> tuple[str, ...]:
    time = START + timedelta(minutes=rng.randrange(500_000))
    measured = (f"{rng.gauss(18, 7):.1f}", f"{rng.uniform(20, 95):.0f}", f"{rng.gauss(1013, 9):.1f}")
    return (f"S{rng.randrange(1000):03}", f"{time:%Y-%m-%d %H:%M}", rng.choice(CITIES), *measured)


def _shipment(rng: random.Random) -> tuple[str, ...]:
    start, end = rng.sample(CITIES, 2)
    return (
        f"SH-{rng.randrange(10**6):06}",
        start,
        end,
        f"{rng.uniform(0.2, 900):.1f}",
        str(rng.randrange(1, 30)),
        rng.choice(NAMES),
    )


TABLES: tuple[tuple[str, tuple[str, ...], Callable[[random.Random], tuple[str, ...]]], ...] = (
    ("orders", ("id", "date", "customer", "product", "price", "count", "total", "state"), _order),
    ("readings of sensors", ("sensor", "time", "place", "temperature", "humidity", "pressure"), _reading),
    ("shipments", ("shipment", "from", "to", "kilograms", "days", "driver"), _shipment),
)
"""Title, columns and a function that makes a row, for each kind of table."""
