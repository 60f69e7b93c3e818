"""The configuration: what a mistake looks like to whoever made it, and what a good file means."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from router import config
from router.config import values
from router.core import Rates
from router.errors import ConfigError
from router.lab.profiles import PROFILES
from tests.certificates import Authority, needs_openssl

ENGINES = "engines: [{url: http://127.0.0.1:8000}]\n"
TWO = "engines: [{url: 'http://a:1', model: m}, {url: 'http://b:1', model: n}]"


class Folder:
    """Writes warmroute.yaml and reads it back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path / "warmroute.yaml"

    def load(self, text: str, environ: Mapping[str, str] | None = None, **options: Any) -> config.Config:
        self.file.write_text(text, encoding="utf-8")
        return config.load(self.file, environ=environ or {}, **options)

    def mistakes(self, text: str, environ: Mapping[str, str] | None = None, **options: Any) -> list[str]:
        """With the file's name taken off, so that "3: models: …" remains."""
        with pytest.raises(ConfigError) as caught:
            self.load(text, environ, **options)
        return [mistake.removeprefix(f"{self.file}:").strip() for mistake in caught.value.mistakes]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_engines_are_enough(folder: Folder) -> None:
    found = folder.load(ENGINES)
    assert (found.listen.host, found.listen.port, found.admin.port) == ("127.0.0.1", 4000, 4001)
    assert found.engines[0].url == "http://127.0.0.1:8000"
    assert found.engines[0].events == "auto"
    assert found.policy.name == "kv_aware"
    assert found.notes == ()


def test_every_mistake_is_told_at_once_in_order(folder: Folder) -> None:
    text = """\
listen: {port: 99999, hots: x}
models:
  llama-3.1:
    tokenizer: Qwen/Qwen3-8B
engines:
  - url: http://a:1/v1
    api_key: ${ENGINE_KEY}
  - url: http://b:1
    events: [{endpoint: "tcp://*:5557", rnak: 3}]
    labels: {zone: 1}
    rates: h1000
indx: 3
index: {max_bytes: 2 GiB}
index: {max_bytes: 2 GiB}
"""
    found = folder.mistakes(text)
    assert [mistake.split(": ")[:2] for mistake in found] == [
        ["1", "listen.port"],
        ["1", "listen.hots"],
        ["4", "models['llama-3.1'].tokenizer"],
        ["6", "engines[0].url"],
        ["7", "engines[0].api_key"],
        ["9", "engines[1].events[0].endpoint"],
        ["9", "engines[1].events[0].rnak"],
        ["10", "engines[1].labels.zone"],
        ["11", "engines[1].rates"],
        ["12", "indx"],
        ["14", "index"],
    ]
    assert found[1].endswith("is not a known key (did you mean 'host'?)")
    assert "ENGINE_KEY" in found[4]
    assert found[-1].endswith("is given twice (first in line 13; keep one)")


def test_what_fits_together_is_checked_beside_invalid_values(folder: Folder) -> None:
    found = folder.mistakes("models: {a: {aliases: [b]}, b: {parity: maybe}}\n" + ENGINES)
    assert found == [
        "1: models.b.parity: must be 'enforce', 'warn' or 'off'",
        "1: models.a.aliases[0]: 'b' is a model of its own (take another alias)",
    ]


@needs_openssl
def test_the_proxy_protocol_does_not_go_with_tls_of_ours(folder: Folder) -> None:
    pair = Authority(folder.path, "ca")
    tls = f"tls: {{cert: {pair.cert}, key: {pair.key}}}"
    (mistake,) = folder.mistakes(f"listen: {{proxy_protocol: true, trusted_proxies: [10.0.0.0/8], {tls}}}\n" + ENGINES)
    assert mistake.startswith("1: listen.proxy_protocol: comes before TLS, which is not supported")


def test_addresses_and_header_names_are_read_as_people_write_them(folder: Folder) -> None:
    text = "listen: {trusted_proxies: [10.0.0.5, 10.0.0.0/8, '2001:db8::/32'], forward_headers: [X-Team]}\n"
    listen = folder.load(text + ENGINES).listen
    assert listen.trusted_proxies == ("10.0.0.5/32", "10.0.0.0/8", "2001:db8::/32")
    assert listen.forward_headers == ("x-team",)


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("", "engines: is missing"),
        ("engines: []", "1: engines: needs at least one engine (engines: [{url: http://HOST:PORT}])"),
        ("- a", "1: must be a mapping of keys to values"),
        ("listen: {port: 1", "1: is not YAML: expected ',' or '}', but got '<stream end>'"),
        (
            "engines: [{url: 'http://a:1', api_base: x}]",
            "1: engines[0].api_base: is not a known key (did you mean 'url'?)",
        ),
        ("admin: 3\n" + ENGINES, "1: admin: must be a mapping of keys to values"),
        ("listen: &a {cors: *a}\n" + ENGINES, "1: listen.cors: contains itself through an alias"),
        ("policy: {weights: {queue: -1}}\n" + ENGINES, "1: policy.weights.queue: must be greater than or equal to 0"),
        ("listen: {port: !!int x}\n" + ENGINES, "1: listen.port: is no int, as its tag says (leave the tag out)"),
        ("listen: {keep_alive_s: !!float x}\n" + ENGINES, "1: listen.keep_alive_s: is no float, as its tag"),
        ("policy: {weights: {queue: !!python/name:os.x 1}}\n" + ENGINES, "1: policy.weights.queue: the tag"),
        ("policy: {ttft_slo_s: 0}\n" + ENGINES, "1: policy.ttft_slo_s: must be greater than 0"),
        (
            "policy: {ttft_slo_per_1k_tokens_ms: 62.5}\n" + ENGINES,
            "1: policy.ttft_slo_per_1k_tokens_ms: adds to ttft_slo_s, which is not given",
        ),
        (
            "policy: {shadow: [lmetric, llmd, lmetric]}\n" + ENGINES,
            "1: policy.shadow[2]: 'lmetric' is given twice",
        ),
        ("policy: {shadow: lmetric}\n" + ENGINES, "1: policy.shadow: must be a list"),
        ("models: {m: {fallbacks: [m]}}\n" + TWO, "1: models.m.fallbacks[0]: 'm' is the model itself"),
        ("models: {m: {fallbacks: [x]}}\n" + TWO, "1: models.m.fallbacks[0]: no engine serves 'x'"),
        ("models: {m: {context_window_fallbacks: [x]}}\n" + TWO, "1: models.m.context_window_fallbacks[0]: no engine"),
        ("models: {c: {split: {m: 1, x: 2}}}\n" + TWO, "1: models.c.split.x: no engine serves 'x'"),
        ("models: {m: {split: {n: 1}}}\n" + TWO, "1: models.m.split: has engines of its own"),
        ("models: {c: {split: {d: 1}}, d: {split: {m: 1}}}\n" + TWO, "1: models.c.split.d: 'd' is a split, too"),
        ("models: {c: {split: {m: 0}}}\n" + TWO, "1: models.c.split.m: must be greater than 0"),
        ("models: {m: {failover: {share: 1}}}\n" + TWO, "1: models.m.failover.share: is for all models together"),
        ("failover: {move_on_s: 9}\n" + ENGINES, '1: failover.move_on_s: does nothing unless retry_on has "silent"'),
        ("failover: {retry_on: [ever]}\n" + ENGINES, "1: failover.retry_on[0]: must be"),
        ("failover: {attempts: 0}\n" + ENGINES, "1: failover.attempts: must be greater than or equal to 1"),
        ("engines: [{url: 'http://a:1', price_per_hour: -2}]", "1: engines[0].price_per_hour: must be greater than"),
        ("engines: [{url: 'http://a:1', price_per_hour: .inf}]", "1: engines[0].price_per_hour: must be a"),
        (
            "listen:\n  drain: {accept_s: 9, finish_s: 8}\n" + ENGINES,
            "2: listen.drain.accept_s: is longer than finish_s (8)",
        ),
        (
            "listen: {trusted_proxies: [10.0.0.1/8]}\n" + ENGINES,
            "1: listen.trusted_proxies[0]: must be an address or a",
        ),
        ("listen: {trusted_proxies: [lb.example.com]}\n" + ENGINES, "1: listen.trusted_proxies[0]: must be an address"),
        ("listen: {proxy_protocol: true}\n" + ENGINES, "1: listen.proxy_protocol: needs listen.trusted_proxies"),
        ("listen: {forward_headers: [Cookie]}\n" + ENGINES, "1: listen.forward_headers[0]: is never sent to engines"),
        ("listen: {forward_headers: ['a b']}\n" + ENGINES, "1: listen.forward_headers[0]: is not the name of a header"),
        ("listen: {body_bytes_per_s: 0}\n" + ENGINES, "1: listen.body_bytes_per_s: must be greater than 0"),
        ("admin: {port: 4000}\n" + ENGINES, "1: admin.port: is taken by listen (4000); use another"),
        ("engines: [{url: 'http://127.0.0.1:4000'}]", "1: engines[0].url: is the gateway's own address"),
        ("engines: [{url: 'http://0.0.0.0:8000'}]", "1: engines[0].url: is an address to listen on"),
        ("engines: [{url: 'http://me:pw@a:1'}]", "1: engines[0].url: must not carry a user or password"),
        ("engines: [{url: 'dns+http://pool'}]", "1: engines[0].url: needs a port"),
        ("engines: [{url: 'http://a:99999'}]", "1: engines[0].url: has a port that is not a number up to 65535"),
        ("engines: [{url: 'a:1'}]", "1: engines[0].url: must be http://HOST:PORT"),
        ("engines:\n- {url: 'http://a:1'}\n- {url: 'http://A:1/'}", "3: engines[1].url: is the same as engines[0].url"),
        (
            "engines:\n- {url: 'http://a:1', id: x}\n- {url: 'http://b:1', id: x}",
            "3: engines[1].id: is the same as the id",
        ),
        ("engines: [{url: 'http://a:1', id: a/b}]", "1: engines[0].id: may have letters"),
        ("engines: [{url: 'http://a:1', api_key: 123}]", "1: engines[0].api_key: must be text (put it in quotes)"),
        (
            "engines: [{url: 'http://a:1', events: [{endpoint: 'tcp://a:1'}, {endpoint: 'tcp://a:2'}]}]",
            "1: engines[0].events[1].rank: rank 0 is given twice",
        ),
        ("engines: [{url: 'http://a:1', events: [{}]}]", "1: engines[0].events[0].endpoint: is missing"),
        ("models: {a: {aliases: [c]}, b: {aliases: [c]}}\n" + ENGINES, "1: models.b.aliases[0]: 'c' is already"),
        ("models: {a: {aliases: ['*']}}\n" + ENGINES, "1: models.a.aliases[0]: '*' stands for all other"),
        (
            "models: {a: {aliases: [c]}}\nengines: [{url: 'http://a:1', model: c}]",
            "2: engines[0].model: is an alias (write its model: 'a')",
        ),
        ("models: {a: {tokenizer: tiktoken:x}}\n" + ENGINES, "1: models.a.tokenizer: must be tiktoken:NAME@FILE"),
        ("models: {a: {chat_template: no.jinja}}\n" + ENGINES, "1: models.a.chat_template: there is no file"),
        ("state_dir: ${A\n" + ENGINES, "1: state_dir: has a broken reference"),
        (ENGINES + "listen: {port: !!int many}", "2: listen.port: is no int, as its tag says"),
        (ENGINES + "listen: {port: !!null 5}", "2: listen.port: is no null, as its tag says"),
        ("a: " + "[" * 2000, "is nested too deeply"),
    ],
)
def test_one_mistake(folder: Folder, text: str, mistake: str) -> None:
    (found,) = folder.mistakes(text)
    assert found.startswith(mistake)


def test_a_file_that_cannot_be_read(folder: Folder) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read: No such file"):
        config.load(folder.path / "nowhere.yaml")
    folder.file.write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(ConfigError, match="it is not UTF-8 text"):
        config.load(folder.file)


def test_words_that_older_yaml_takes_for_booleans(folder: Folder) -> None:
    found = folder.load("models: {a: {parity: off}}\nengines: [{url: 'http://a:1', events: off}]\nadmin: {enabled: no}")
    assert (found.models["a"].parity, found.engines[0].events, found.admin.enabled) == ("off", "off", False)


def test_sections_left_empty_mean_the_defaults(folder: Folder) -> None:
    found = folder.load("listen:\nmodels:\n  a:\nstate_dir:\n" + ENGINES)
    assert found.listen.port == 4000
    assert found.models == {"a": config.Model()}
    assert found.state_dir == Path("~/.local/state/warmroute").expanduser()


def test_anchors_and_merge_keys(folder: Folder) -> None:
    found = folder.load("""\
engines:
  - &first {url: "http://a:1", model: m, labels: {zone: a}}
  - {<<: *first, url: "http://b:1"}
""")
    assert [(e.url, e.model, e.labels) for e in found.engines] == [
        ("http://a:1", "m", {"zone": "a"}),
        ("http://b:1", "m", {"zone": "a"}),
    ]


class TestEnvironment:
    def test_references(self, folder: Folder) -> None:
        text = """\
listen: {host: "${HOST_A:-127.0.0.1}", port: "${PORT_A:-4100}"}
engines:
  - {url: "http://${NAME}:80${DIGIT}", api_key: os.environ/KEY, model: "${MODEL:-}", labels: {a: "$${NAME}"}}
"""
        found = folder.load(text, {"NAME": "gpu", "DIGIT": "80", "KEY": "s3cret"})
        engine = found.engines[0]
        assert (found.listen.host, found.listen.port) == ("127.0.0.1", 4100)
        assert (engine.url, engine.model, engine.labels) == ("http://gpu:8080", None, {"a": "${NAME}"})
        assert engine.api_key is not None
        assert engine.api_key.get_secret_value() == "s3cret"

    def test_an_empty_key_is_a_mistake_not_a_missing_key(self, folder: Folder) -> None:
        text = "engines: [{url: 'http://a:1', api_key: '${KEY}'}]"
        assert folder.mistakes(text, {"KEY": ""}) == ["1: engines[0].api_key: must not be empty"]

    def test_secrets_never_show(self, folder: Folder) -> None:
        text = "engines: [{url: 'http://a:1', api_key: '${KEY}'}]"
        found = folder.load(text, {"KEY": "s3cret"})
        assert "s3cret" not in repr(found) + str(found.model_dump()) + found.model_dump_json()
        wrong = folder.mistakes("engines: [{url: '${KEY}', id: '${KEY}', kind: {a: '${KEY}'}}]", {"KEY": "s3cret:/"})
        assert "s3cret" not in "".join(wrong)

    def test_overrides(self, folder: Folder) -> None:
        environ = {
            "WARMROUTE_LISTEN_PORT": "4100",
            "WARMROUTE_STATE_DIR": "state",
            "WARMROUTE_PORT": "tcp://10.0.0.1:1",
        }
        found = folder.load("listen: {port: 4200}\n" + ENGINES, environ)
        assert (found.listen.port, found.state_dir) == (4100, folder.path / "state")
        assert folder.load(ENGINES, environ, flags={"port": 4300, "host": None}).listen.port == 4300

    def test_a_wrong_override_is_blamed_on_its_origin(self, folder: Folder) -> None:
        (mistake,) = folder.mistakes(ENGINES, {"WARMROUTE_LISTEN_PORT": "x"})
        assert mistake.startswith("environment WARMROUTE_LISTEN_PORT: listen.port: must be a valid integer")


class TestFlags:
    def test_without_a_file(self) -> None:
        flags = {"port": 0, "admin_port": 0, "tokenizer": "demo", "policy": "lmetric"}
        found = config.from_flags(["http://a:1", "http://b:1"], flags=flags, environ={})
        assert [engine.url for engine in found.engines] == ["http://a:1", "http://b:1"]
        assert (found.listen.port, found.admin.port, found.policy.name) == (0, 0, "lmetric")
        assert found.model("anything").tokenizer == "demo"

    def test_mistakes_name_the_flag(self) -> None:
        with pytest.raises(ConfigError) as caught:
            config.from_flags(["a:1"], flags={"port": -1}, environ={})
        assert [m.split(": ")[0] for m in caught.value.mistakes] == ["--port", "--engine"]


class TestFiles:
    def test_paths_start_at_the_file(self, folder: Folder) -> None:
        (folder.path / "model").mkdir()
        (folder.path / "model/tokenizer.json").write_text("{}")
        (folder.path / "ranks").write_text("")
        (folder.path / "chat.jinja").write_text("")
        found = folder.load(
            "models: {a: {tokenizer: model, chat_template: chat.jinja}, b: {tokenizer: tiktoken:x@ranks}}\n" + ENGINES
        )
        assert found.model("a").tokenizer == str(folder.path / "model")
        assert found.model("a").chat_template == folder.path / "chat.jinja"
        assert found.model("b").tokenizer == f"tiktoken:x@{folder.path / 'ranks'}"

    def test_state_dir_is_private(self, folder: Folder) -> None:
        found = folder.load("state_dir: a/b\n" + ENGINES)
        made = found.make_state_dir()
        assert made == found.make_state_dir() == folder.path / "a/b"
        assert stat.S_IMODE(made.stat().st_mode) == 0o700

    def test_a_state_dir_that_cannot_be_made(self, folder: Folder) -> None:
        (folder.path / "a").write_text("")
        with pytest.raises(ConfigError, match=r"state_dir: .* cannot be made: Not a directory"):
            folder.load("state_dir: a/b\n" + ENGINES).make_state_dir()


def test_models_by_name_alias_and_star(folder: Folder) -> None:
    found = folder.load("models: {a: {aliases: [gpt-4o]}, '*': {tokenizer: none}}\n" + ENGINES)
    assert found.aliases == {"gpt-4o": "a"}
    assert found.model("a").tokenizer is None
    assert found.model("never heard of").tokenizer == "none"


def test_an_engine_as_the_core_noun(folder: Folder) -> None:
    found = folder.load("""\
engines:
  - {url: "http://A:1", served: x, api_key: k, events: [{endpoint: "tcp://a:5557", replay: "tcp://a:5558", rank: 1}]}
  - {url: "dns+http://pool:8000", id: pool, events: off}
  - {url: "http://c:1", id: c, price_per_hour: 2.5, max_running_requests: 64}
""")
    first, pool, last = found.engines
    instance = first.instance(engine="vllm", model="m")
    running = instance.max_running_requests, last.instance(engine="vllm", model="m").max_running_requests
    assert running == (None, 64)
    assert (instance.id, instance.url, instance.served, instance.api_key) == ("a:1", "http://a:1", "x", "k")
    assert instance.events is not None
    assert [(s.rank, s.endpoint, s.replay) for s in instance.events] == [(1, "tcp://a:5557", "tcp://a:5558")]
    assert (instance.price_per_hour, last.instance(engine="vllm", model="m").price_per_hour) == (None, 2.5)
    assert pool.discovered
    one = pool.instance(engine="vllm", model="m", url="http://10.0.0.3:8000")
    assert (one.id, one.url, one.events) == ("pool-10.0.0.3:8000", "http://10.0.0.3:8000", ())
    assert (last.instance(engine="vllm", model="m").id, last.instance(engine="vllm", model="m").events) == ("c", None)


def test_rates_by_profile_by_number_or_both(folder: Folder) -> None:
    found = folder.load("""\
engines:
  - {url: "http://a:1", rates: llama-3.1-8b-h200}
  - {url: "http://b:1", rates: {c1_ms: 0.5}}
  - {url: "http://c:1", rates: {profile: llama-3.1-70b-tp4-h100, c1_ms: 0}}
  - {url: "http://d:1"}
""")
    a, b, c, d = [engine.rates.rates() if engine.rates else None for engine in found.engines]
    assert a == values.RATE_PROFILES["llama-3.1-8b-h200"]
    assert b is not None
    assert (b.c1_ms, b.c0_ms) == (0.5, Rates().c0_ms)
    assert c is not None
    assert (c.c1_ms, c.c0_ms) == (0.0, 15.8)
    assert d is None


def test_rates_have_the_keys_and_the_profiles_of_the_engine_model() -> None:
    assert set(config.EngineRates.model_fields) == {"profile", *Rates.__struct_fields__}
    assert {name: profile.rates for name, profile in PROFILES.items()} == values.RATE_PROFILES


def test_sizes_in_words(folder: Folder) -> None:
    found = folder.load("index: {max_bytes: 2 GiB}\nprompt: {memo_bytes: 1024}\n" + ENGINES)
    assert (found.index.max_bytes, found.prompt.memo_bytes) == (2 << 30, 1024)


def test_listening_beyond_loopback_is_allowed_and_noted(folder: Folder) -> None:
    found = folder.load("listen: {host: 0.0.0.0}\nadmin: {host: '::'}\n" + ENGINES)
    assert [note.split(" is ")[0] for note in found.notes] == ["listen.host 0.0.0.0"]
    assert folder.load("listen: {host: localhost}\nadmin: {host: '::1'}\n" + ENGINES).notes == ()


def test_engines_without_a_price_are_noted_where_prices_count(folder: Folder) -> None:
    engines = "engines: [{url: 'http://a:1', price_per_hour: 2}, {url: 'http://b:1'}, {url: 'http://c:1', id: c}]"
    (note,) = folder.load(engines + "\npolicy: {weights: {price: 1.0e+5}}").notes
    assert note.endswith("are free: b:1, c")
    assert folder.load(engines + "\npolicy: {weights: {price: 0}}").notes == ()
    priced = "engines: [{url: 'http://a:1', price_per_hour: 0}]\npolicy: {weights: {price: 3}}"
    assert folder.load(priced).notes == ()


def test_a_further_check_is_reported_with_its_line(folder: Folder) -> None:
    def check(found: config.Config) -> Iterator[config.Mistake]:
        yield ("policy", "name"), f"no {found.policy.name!r}"

    assert folder.mistakes(ENGINES + "policy: {name: x}", check=check) == ["2: policy.name: no 'x'"]


def _sections() -> list[type[BaseModel]]:
    return [kind for kind in vars(config).values() if isinstance(kind, type) and issubclass(kind, config.Section)]


@pytest.mark.parametrize("section", _sections(), ids=lambda section: section.__name__)
def test_every_key_is_described_in_the_schema(section: type[BaseModel]) -> None:
    undescribed = [name for name, field in section.model_fields.items() if not field.description]
    assert undescribed == []


def test_the_schema_is_of_the_whole_file() -> None:
    schema = config.json_schema()
    assert schema["$schema"].endswith("2020-12/schema")
    assert schema["required"] == ["engines"]
    assert schema["properties"]["engines"]["minItems"] == 1
    assert "\n" not in schema["$defs"]["Model"]["properties"]["tokenizer"]["description"]


@pytest.mark.parametrize(
    ("auth", "mistake"),
    [
        ("{header: {name: x-tenant-id}}", "auth.header.peers: is missing"),
        ("{header: {name: Authorization, peers: [10.0.0.1]}}", "auth.header.name: holds keys"),
        ("{header: {name: 'x tenant', peers: [10.0.0.1]}}", "auth.header.name: is not the name of a header"),
        ("{header: {name: x-tenant-id, peers: [here]}}", "auth.header.peers[0]: must be an address"),
        ("{mode: open, header: {name: x-tenant-id, peers: [10.0.0.1]}}", "auth.header: does nothing"),
        ("{header: {name: X-Team, peers: [10.0.0.1]}}", "listen.forward_headers: has x-team"),
        ("{pepper: short}", "auth.pepper: "),
    ],
)
def test_mistakes_of_identity(folder: Folder, auth: str, mistake: str) -> None:
    (found,) = folder.mistakes(f"listen: {{forward_headers: [x-team]}}\nauth: {auth}\n" + ENGINES)
    assert mistake in found
    assert "short" not in found.partition("pepper: ")[2]


def test_beyond_loopback_it_depends_on_who_is_let_in(folder: Folder) -> None:
    def notes(mode: str) -> list[str]:
        found = folder.load(f"listen: {{host: 0.0.0.0}}\nauth: {{mode: {mode}}}\n" + ENGINES).notes
        return [note.partition(": ")[2] for note in found]

    assert notes("keys") == []
    assert notes("auto") == ["while there are no tenants, nobody is served"]
    assert notes("open") == ["whoever reaches it may use the engines"]
