"""What `headgate route` is told: one TOML file, or flags; what may change while it runs; predicted waits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import cached_property, lru_cache
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from headgate import settings_base
from headgate.core.errors import InputError
from headgate.core.files import read_regular
from headgate.core.request import Slo
from headgate.estimators.traffic import WindowRate
from headgate.methods.scaling import read_scaling
from headgate.settings_base import (
    Count,
    Delay,
    Port,
    Seconds,
    SettingsModel,
    Share,
    Switch,
    Weight,
    check_promises,
    check_worth,
    promised,
)

# -- sizes

SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_WRITTEN = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")


def size(value: object) -> object:
    if not isinstance(value, str):
        return value
    written = _WRITTEN.fullmatch(value.strip())
    if written is None or written[2] not in SIZES:
        raise ValueError(f"{value!r} is not a size; write 4096, 64KiB, 32MiB or 1GiB")
    return int(float(written[1]) * SIZES[written[2]])


Bytes = Annotated[int, BeforeValidator(size), Field(strict=True, ge=1)]


# -- URLs, addresses, names

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MOST_FORWARDED = 1024  # characters of X-Forwarded-For that are read, from its end
ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:]+\]|[^:\s/]*):(?P<port>[0-9]{1,5})")


def _url(text: str) -> str:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ValueError(f"{text!r} is not a URL; write http://HOST:PORT") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ValueError(f"{text!r} is not a URL of an engine; write http://HOST:PORT")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("a URL of an engine has no user, query or fragment; use key_env for its key")
    if parts.path.rstrip("/").endswith("/v1"):
        raise ValueError(f"{text!r} ends in /v1, which the router adds; write http://HOST:PORT")
    if not text.isascii() or any(c <= " " or c == "\x7f" for c in text):
        raise ValueError("a URL of an engine is plain ASCII without spaces")
    return text.rstrip("/")


def _name(text: str) -> str:
    if not NAME.fullmatch(text):
        raise ValueError(f"{text!r} is not a name; use letters, digits, . _ and -, at most 64")
    return text


def address(text: str) -> tuple[str, int]:
    found = ADDRESS.fullmatch(text)
    if found is None or int(found["port"]) > 65535:
        raise ValueError(f"{text!r} is not an address; write HOST:PORT, such as 127.0.0.1:9300")
    return found["host"].strip("[]") or "127.0.0.1", int(found["port"])


def client_at(peer: object) -> str:
    """Whose connection it is: its address, of IPv6 the network that one client may have, 48 bits."""
    host = peer[0] if isinstance(peer, tuple) and peer else ""
    if ":" not in host:
        return str(host)
    found = ip_address(host.partition("%")[0])
    if isinstance(found, IPv6Address) and found.ipv4_mapped is None:
        return str(IPv6Address(int(found) >> 80 << 80))
    return str(getattr(found, "ipv4_mapped", found))


def forwarded_for(peer: object, shown: Sequence[str], proxies: Sequence[str]) -> str:
    """The last address that is no proxy of ours: what stands before it anyone may have written."""
    client = client_at(peer)
    if not proxies or not _trusted(peer[0] if isinstance(peer, tuple) and peer else "", proxies):
        return client
    for hop in reversed(",".join(shown)[-MOST_FORWARDED:].split(",")):
        host = hop.strip().strip("[]")
        try:
            ip_address(host)
        except ValueError:
            return client
        client = client_at((host,))
        if not _trusted(host, proxies):
            return client
    return client


def _trusted(host: str, proxies: Sequence[str]) -> bool:
    try:
        found = ip_address(host.partition("%")[0])
    except ValueError:
        return False
    found = getattr(found, "ipv4_mapped", None) or found
    return any(found in network for network in map(_network, proxies))


@lru_cache(maxsize=256)
def _network(text: str) -> IPv4Network | IPv6Network:
    try:
        return ip_network(text, strict=False)
    except ValueError:
        raise ValueError(f"{text!r} is not a network; write 10.0.0.0/8 or an address") from None


Url = Annotated[str, AfterValidator(_url)]
Name = Annotated[str, AfterValidator(_name)]
Address = Annotated[str, AfterValidator(lambda text: address(text) and text)]
Network = Annotated[str, AfterValidator(lambda text: _network(text) and text)]


# -- the file

MOST_CLASSES = 64
MOST_BYTES = 1 << 24  # of a file
LOOPBACK = ("127.0.0.1", "::1", "localhost")

Price = Annotated[float, Field(ge=0)]


class FrontSettings(SettingsModel):
    host: str = "127.0.0.1"
    port: Port = 8000
    admin: Address = "127.0.0.1:9300"
    key_file: str | None = None
    open: Switch = False  # no keys on an address that others can reach
    body_limit: Bytes = 32 << 20
    header_limit: Bytes = 8190
    headers: Count = 64
    connections: Count = 10_000
    client_connections: Count | None = None  # of one address
    proxies: tuple[Network, ...] = ()  # whose X-Forwarded-For is believed
    processes: Annotated[int, Field(strict=True, ge=1, le=256)] | None = None
    head_timeout: Seconds = 10.0
    body_timeout: Seconds = 30.0
    keep_alive: Seconds = 15.0
    tls_cert: str | None = None
    tls_key: str | None = None
    client_ca: str | None = None  # clients must show a certificate of this authority
    engine_ca: str | None = None
    engine_cert: str | None = None  # shown to engines, with its key
    engine_cert_key: str | None = None
    pass_authorization: Switch = False
    allow_kv_params: Switch = False
    show_engine: Switch = False  # name the engine in x-headgate-engine
    tell_engines: Literal["auto", "always", "never"] = "auto"  # class and tenant, in vllm_xargs
    access_log: str | None = None  # a file, or - for standard output
    trace: str | None = None  # a file that headgate trace and compare --trace read
    drain_delay: Delay = 5.0
    drain_timeout: Seconds = 120.0


class RouteLimits(SettingsModel):
    queue: Count = 256
    queue_ttl: Seconds = 30.0
    inflight: Count = 4096
    client_inflight: Count | None = None  # of one key, or of one address where there are no keys
    inflight_bytes: Bytes = 1 << 30
    connect: Seconds = 5.0
    first_token: Seconds = 120.0
    idle: Seconds = 60.0
    client_stall: Seconds = 30.0  # a client that reads nothing of its answer
    tries: Annotated[int, Field(strict=True, ge=1, le=10)] = 3
    retry_share: Share = 0.2
    retry_500: Switch = False
    answer_buffer: Bytes = 4 << 20  # of an answer that is no stream and can still be retried
    event: Bytes = 1 << 20


class TokenPrices(SettingsModel):
    prompt: Price = 1.0
    output: Price = 2.0


class Router(SettingsModel):
    name: str = "least-loaded"
    settings: dict[str, bool | int | float | str] = Field(default_factory=dict)
    order: tuple[str, ...] = ()
    replan: Seconds = 10.0
    card: str | None = None
    prices: TokenPrices = TokenPrices()


class Match(SettingsModel):
    key: str | tuple[str, ...] = ()
    header: str | None = None  # the value of x-headgate-class
    model: str | tuple[str, ...] = ()
    field: str | None = None  # the value of metadata.class
    prompt: tuple[int, int] | None = None  # tokens, estimated: at least, and below

    @model_validator(mode="after")
    def _some_prompts(self) -> Match:
        if self.prompt is not None and self.prompt[0] >= self.prompt[1]:
            raise ValueError(f"no prompt has {list(self.prompt)} tokens; write [AT LEAST, BELOW]")
        return self


class Class(SettingsModel):
    name: Name
    match: Match = Match()
    prompt: Annotated[float, Field(gt=0)] | None = None
    output: Annotated[float, Field(gt=0)] | None = None
    rate: Annotated[float, Field(gt=0)] | None = None
    patience: Seconds | None = None
    queue: Count | None = None
    tokens: Count | None = None  # a minute, prompts and outputs together
    priority: Annotated[int, Field(strict=True, ge=-1000, le=1000)] = 0
    ttft: Seconds | None = None  # promised from arrival here to the first token
    tbt: Seconds | None = None  # promised between any two tokens, or instead:
    tpot: Seconds | None = None  # their mean in a request
    envelope: Seconds | None = None  # token j at arrival + ttft + j times this
    weight: Weight | None = None
    background: Switch = False  # promised nothing

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        check_worth(self)
        check_promises(self)
        if self.envelope and not self.ttft:
            raise ValueError("envelope begins where the first token is due; give ttft too")
        return self

    @cached_property
    def slo(self) -> Slo:
        return promised(self, weight=self.weight, background=self.background)


class Addresses(SettingsModel):
    """What one address may have, whatever keys it shows; its share of a queue where no tenant is known."""

    requests: Annotated[float, Field(gt=0, le=1e6)] | None = None  # a second
    tokens: Count | None = None  # a minute
    inflight: Count | None = None
    queue: Annotated[float, Field(gt=0, le=1)] | None = None  # of the queue of a class


class Tenants(Addresses):
    header: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,64}$")] | None = None  # set by a proxy one trusts


OPEN = Addresses(requests=20.0, inflight=128, queue=0.5)  # where everyone is let in without a key


class Replicas(SettingsModel):
    store: str | None = None  # redis://HOST:PORT, rediss:// with TLS, or unix:///PATH
    name: Name = "headgate"  # of the fleet in the store
    password_env: str | None = None  # the environment variable with the store's password
    lease: Annotated[Seconds, Field(ge=1, le=300)] = 5.0  # after which a silent router's slots are free

    @model_validator(mode="after")
    def _is_redis(self) -> Replicas:
        if self.store is not None and not self.store.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError(
                "store is no address of Redis or Valkey; write redis://HOST:6379, rediss://HOST:6379 for "
                "TLS, or unix:///PATH"
            )
        return self


class EngineAt(SettingsModel):
    url: Url
    slots: Annotated[int, Field(strict=True, ge=1, le=100_000)] = 256
    prompts_at_once: Count | None = None
    role: Literal["auto", "any", "mixed", "solo", "prefill", "decode"] = "auto"
    kv_group: str | None = None
    key_env: str | None = None  # the environment variable that holds its key


class Kv(SettingsModel):
    connector: Literal["nixl"] = "nixl"
    lease: Seconds = 30.0
    reuse_tokens: Switch = False  # send the prefiller's prompt_token_ids with the decode


class Discovery(SettingsModel):
    file: str | None = None  # one URL a line, or the [[engines]] tables of a TOML file
    dns: str | None = None  # HOST:PORT, one engine per address
    every: Seconds = 5.0
    slots: Count = 256
    kv_group: str | None = None

    @model_validator(mode="after")
    def _dns_has_port(self) -> Discovery:
        if self.dns is not None:
            address(self.dns)
        return self


class Health(SettingsModel):
    every: Seconds = 1.0
    timeout: Seconds = 2.0
    fails: Count = 3  # probes in a row before an engine is down
    outlier: Annotated[float, Field(gt=1)] = 5.0  # times the median time to first token
    outlier_share: Share = 0.34  # at most this share of engines is ejected
    eject: Seconds = 30.0


class ScalingTable(SettingsModel):
    card: str | None = None  # cost card of the engines (default: that of [router])
    model: str | None = None  # label of the gauge (default: the card's model)
    budget: Count | None = None  # tokens in one step of an engine
    rule: str = "plan"  # RULE:NAME=VALUE,... as for headgate simulate --autoscale

    @model_validator(mode="after")
    def _is_a_rule(self) -> Self:
        read_scaling(self.rule)
        return self


class GateConfig(SettingsModel):
    router: Router = Router()
    classes: tuple[Class, ...] = ()
    default: Class = Class(name="default")
    limits: RouteLimits = RouteLimits()

    @model_validator(mode="after")
    def _distinct_classes(self) -> Self:
        _distinct("class", [each.name for each in (*self.classes, self.default)])
        if len(self.classes) >= MOST_CLASSES:
            raise ValueError(
                f"{len(self.classes)} classes; {MOST_CLASSES - 1} beside the default are the most"
            )
        return self

    @property
    def fewest_slots(self) -> int:
        raise NotImplementedError

    @property
    def tenant_queue(self) -> float:
        return 1.0

    @property
    def kinds(self) -> tuple[str, ...]:
        return (self.default.name, *(each.name for each in self.classes))

    @property
    def class_limits(self) -> dict[str, ClassLimits]:
        limits = self.limits
        return {
            each.name: ClassLimits(each.queue or limits.queue, limits.queue_ttl, self.tenant_queue)
            for each in (self.default, *self.classes)
        }


class Config(GateConfig):
    front: FrontSettings = FrontSettings()
    tenants: Tenants = Tenants()
    addresses: Addresses = Addresses()
    replicas: Replicas = Replicas()
    engines: tuple[EngineAt, ...] = ()
    kv: Kv = Kv()
    discovery: Discovery = Discovery()
    health: Health = Health()
    scaling: ScalingTable | None = None

    @property
    def fewest_slots(self) -> int:
        return min((each.slots for each in self.engines), default=self.discovery.slots)

    @property
    def tenant_queue(self) -> float:
        return self.tenants.queue or 1.0

    @property
    def address_bounds(self) -> Addresses:
        front = self.front
        open = front.open and not front.key_file and front.host not in LOOPBACK
        return OPEN if open and self.addresses == Addresses() else self.addresses

    def doubts(self, key_names: Collection[str]) -> list[str]:
        doubts = []
        if address(self.front.admin)[0] not in LOOPBACK:
            doubts.append(
                f"the admin address {self.front.admin} asks for no key: let only operators reach it, "
                "or use 127.0.0.1"
            )
        for each in self.classes:
            keys = {each.match.key} if isinstance(each.match.key, str) else set(each.match.key)
            doubts += [
                f"class {each.name} wants key {key!r}, which is not in the key file"
                for key in sorted(keys - set(key_names))
            ]
        return doubts

    @model_validator(mode="after")
    def _agrees(self) -> Config:
        _distinct("engine", [each.url for each in self.engines])
        if not self.engines and not self.discovery.file and not self.discovery.dns:
            raise ValueError("no engines; give --engine URL, an [[engines]] table or [discovery]")
        if self.scaling is not None and not (self.scaling.card or self.router.card):
            raise ValueError("[scaling] needs the speed of the engines; give it a card, or [router] one")
        front = self.front
        if bool(front.tls_cert) != bool(front.tls_key):
            raise ValueError("tls_cert and tls_key go together; give both")
        if front.client_ca and not front.tls_cert:
            raise ValueError("client_ca needs TLS; give tls_cert and tls_key, too")
        if front.port and address(front.admin) == (front.host, front.port):
            raise ValueError(f"front.admin {front.admin} is the address of the clients; give it another port")
        if (front.processes or 1) > 1 and self.replicas.store is None:
            raise ValueError(
                f"{front.processes} processes would each fill the engines; give store = "
                '"redis://HOST:6379" in [replicas], through which they share them'
            )
        if front.host not in LOOPBACK and not (front.key_file or front.open or front.client_ca):
            raise ValueError(
                f"{front.host} is open to others and there are no keys; "
                "give --key-file FILE (key_file), client_ca, or --open"
            )
        return self


def _distinct(what: str, names: list[str]) -> None:
    for name, times in Counter(names).items():
        if times > 1:
            raise ValueError(f"{what} {name!r} is there twice; drop one")


def read_config(
    path: str | Path | None, flags: dict[str, dict[str, Any]], engines: list[dict[str, Any]]
) -> Config:
    where, given = ("", dict[str, Any]()) if path is None else (f"{path}: ", tables_in(path))
    for table, values in flags.items():
        known = given.setdefault(table, {})
        if not isinstance(known, dict):
            raise InputError(f"{where}{table} is not a table; write [{table}]")
        known.update(values)
    for tables in ("engines", "classes"):
        if not isinstance(given.get(tables, []), list):
            raise InputError(f"{where}{tables} is not a list of tables; write [[{tables}]]")
    if engines:
        given.setdefault("engines", []).extend(engines)
    return checked(given, where, written=path is not None)


def checked(given: dict[str, Any], where: str = "", written: bool = False) -> Config:
    """The first mistake is said in one line. `written` in a file durations need a unit, else are seconds."""
    return settings_base.checked(Config, given, where, written)


def tables_in(path: str | Path) -> dict[str, Any]:
    return settings_base.parse_toml(read_text(path), path, "router file")


def read_text(path: str | Path) -> str:
    """A regular file of bounded size: the event loop waits for it."""
    try:
        return read_regular(str(path), MOST_BYTES).decode("utf-8")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; give a readable file") from None
    except ValueError as error:
        raise InputError(f"{path}: {error}; give a text file") from None


# -- a new file for a running router

FIXED = tuple(
    name
    for name in FrontSettings.model_fields
    if name not in ("key_file", "body_limit", "body_timeout", "pass_authorization", "allow_kv_params",
                    "show_engine", "tell_engines", "drain_delay", "drain_timeout", "proxies")
)  # fmt: skip

TABLES = ("front", "limits", "router", "classes", "default", "tenants", "addresses", "kv", "discovery",
          "health", "scaling")  # fmt: skip


def changes(old: Config, new: Config) -> list[str]:
    """In words; what needs a restart is refused."""
    for name in FIXED:
        if getattr(old.front, name) != getattr(new.front, name):
            raise InputError(f"front.{name} cannot change while the router runs; restart it")
    if old.replicas != new.replicas:
        raise InputError("[replicas] cannot change while the router runs; restart it")
    if gone := sorted({known.name for known in old.classes} - {known.name for known in new.classes}):
        raise InputError(f"class {gone[0]!r} cannot be dropped while the router runs; restart it")
    before = {each.url: each for each in old.engines}
    after = {each.url: each for each in new.engines}
    lines = [
        f"engine {url} is added with {each.slots} slots" for url, each in after.items() if url not in before
    ]
    lines += [f"engine {url} is drained and retired" for url in before if url not in after]
    lines += [
        f"engine {url} has new settings" for url in before if after.get(url, before[url]) != before[url]
    ]
    lines += [f"[{table}] has new settings" for table in TABLES if getattr(old, table) != getattr(new, table)]
    return lines or ["nothing changes"]


# -- how long a queue takes, and Retry-After

HALF_LIFE = 30.0  # seconds, of the rate at which a class is served
SOONEST, LATEST = 1, 60  # seconds of Retry-After
UNKNOWN = 15.0  # seconds predicted for a queue of which no request was served yet


class ClassLimits(NamedTuple):
    queue: int = 256  # requests
    ttl: float = 30.0  # seconds in the queue
    tenant: float = 1.0  # share of `queue` that one tenant may have


class Waits:
    def __init__(self, draw: Callable[[], float]) -> None:
        self._draw = draw
        self._rates: dict[str, WindowRate] = {}

    def served(self, kind: str, now: float) -> None:
        self._rates.setdefault(kind, WindowRate(HALF_LIFE)).update(now)

    def predicted(self, kind: str, ahead: int, now: float) -> float:
        rate = self._rates[kind].value(now) if kind in self._rates else 0.0
        if rate > 0:
            return ahead / rate
        return UNKNOWN if ahead else 0.0

    def retry_after(self, kind: str, ahead: int, now: float) -> int:
        """Whole seconds after which a refused client may come again, jittered by an eighth."""
        wait = self.predicted(kind, ahead, now) * (0.875 + 0.25 * self._draw())
        return int(min(max(wait, SOONEST), LATEST))
