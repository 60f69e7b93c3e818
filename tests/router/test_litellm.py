"""Two files as people have them, and what becomes of each line."""

from __future__ import annotations

import stat
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml

from router import config
from router.cli.import_litellm import import_litellm
from router.cli.office import run
from router.config.litellm import Imported
from router.errors import ConfigError

FILES = Path(__file__).parent / "litellm_files"
ENVIRONMENT = {
    "VLLM_KEY": "vllm-secret",
    "EMBED_BASE": "http://10.0.0.9:8000/v1",
    "REDIS_HOST": "redis.prod",
    "REDIS_PASSWORD": "redis-secret",
    "LITELLM_MASTER_KEY": "m" * 32,
}


def _imported(name: str, environ: dict[str, str] | None = None) -> Imported:
    return config.from_litellm(FILES / name, environ=ENVIRONMENT if environ is None else environ)


def _loaded(found: Imported, folder: Path) -> config.Config:
    """As `warmroute check` reads it."""
    file = folder / "warmroute.yaml"
    file.write_text(yaml.safe_dump(found.data))
    return config.load(file, environ=ENVIRONMENT)


def _left(found: Imported) -> dict[str, str]:
    return {remark.where: remark.what for remark in found.remarks if not remark.taken}


def test_engines_models_and_aliases(tmp_path: Path) -> None:
    loaded = _loaded(_imported("selfhosted.yaml"), tmp_path)
    engines = {engine.url: (engine.model, engine.served) for engine in loaded.engines}
    llama = ("llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct")
    assert engines == {
        "http://10.0.0.5:8000": llama,
        "http://10.0.0.6:8000": llama,
        "http://10.0.0.7:8000": ("qwen3-8b", None),
        "http://10.0.0.8:8000": ("qwen3-8b-awq", None),
        "http://10.0.0.9:8000": ("embed", "bge-m3"),
    }
    assert loaded.engines[0].api_key is not None
    assert loaded.engines[0].api_key.get_secret_value() == "vllm-secret"
    assert loaded.models["chat"].split == {"qwen3-8b": 9, "qwen3-8b-awq": 1}
    assert loaded.aliases == {"gpt-3.5-turbo": "llama-3.1-8b", "gpt-4": "chat", "hidden-one": "embed"}
    assert loaded.models["llama-3.1-8b"].fallbacks == ("chat",)
    assert loaded.models["llama-3.1-8b"].context_window_fallbacks == ("chat",)


def test_times_retries_redis_and_the_master_key(tmp_path: Path) -> None:
    loaded = _loaded(_imported("selfhosted.yaml"), tmp_path)
    limits = loaded.models["llama-3.1-8b"].timeouts
    assert (limits.total_s, limits.first_byte_s, loaded.timeouts.total_s) == (600, 30, 600)
    assert loaded.failover.attempts == 4
    assert loaded.redis.url is not None
    assert loaded.redis.url.get_secret_value() == "redis://:redis-secret@redis.prod:6380"
    key = loaded.admin.auth.bootstrap_key
    assert key is not None
    assert key.get_secret_value() == "m" * 32


def test_prices_are_exact() -> None:
    assert _imported("selfhosted.yaml").prices == {
        "llama-3.1-8b": {
            "uncached_input": Decimal("0.2"),
            "output": Decimal("0.6"),
            "cache_read": Decimal("0.02"),
        }
    }


def test_no_secret_is_written_down_that_was_a_reference() -> None:
    written = yaml.safe_dump(_imported("selfhosted.yaml").data)
    assert "${VLLM_KEY}" in written
    assert "${LITELLM_MASTER_KEY}" in written
    assert "redis://:${REDIS_PASSWORD}@${REDIS_HOST}:6380" in written
    assert not any(secret in written for secret in ("vllm-secret", "redis-secret", "m" * 32))


def test_every_line_is_answered_for_in_order() -> None:
    found = _imported("selfhosted.yaml")
    lines = [int(remark.place.rpartition(":")[2]) for remark in found.remarks]
    assert lines == sorted(lines)
    left = _left(found)
    assert "outside provider" in left["model_list[7]"]
    assert "wildcard" in left["model_list[8]"]
    assert "qwen3-8b" in left["model_list[5]"]  # a LoRA beside its base model, at the same address
    assert "limits" in left["model_list[0].litellm_params.rpm"]
    for where in (
        "model_list[1].litellm_params.weight",
        "litellm_settings.drop_params",
        "litellm_settings.callbacks",
        "router_settings.routing_strategy",
        "router_settings.cooldown_time",
        "router_settings.model_group_alias.nothing",
        "general_settings.database_url",
        "general_settings.alerting",
        "guardrails",
    ):
        assert where in left, where
    assert "'claude' is not served" in left["router_settings.fallbacks[0]['llama-3.1-8b']"]
    assert str(found.remarks[0]).startswith(
        f"{FILES / 'selfhosted.yaml'}:3: model_list[0]: taken: http://10.0.0.5:8000"
    )


def test_what_is_no_engine_of_ours(tmp_path: Path) -> None:
    found = _imported("mixed.yaml", {})
    left = _left(found)
    assert "'azure' is not served yet" in left["model_list[0]"]
    assert "outside provider" in left["model_list[1]"]
    assert "user or password" in left["model_list[3]"]
    assert "end after the port" in left["model_list[4]"]
    assert "openai/llama3" in left["model_list[5]"]
    assert "no model_name" in left["model_list[6]"]
    assert "no time" in left["model_list[2].litellm_params.timeout"]
    assert "six places" in left["model_list[2].litellm_params.output_cost_per_token"]
    assert "32 characters" in left["general_settings.master_key"]
    assert not any("secret" in str(remark) for remark in found.remarks)
    assert found.prices == {"local": {"uncached_input": Decimal(0)}}
    loaded = _loaded(found, tmp_path)
    assert [(one.url, one.model, one.served) for one in loaded.engines] == [
        ("http://192.168.1.20:8080", "local", "mistral-small")
    ]
    assert loaded.failover.attempts == 1
    assert loaded.redis.url is not None


def test_an_address_that_only_the_environment_knows_stays_a_reference() -> None:
    unknown = _imported("selfhosted.yaml", {})
    assert unknown.data["engines"][-1]["url"] == "${EMBED_BASE}"
    known = _imported("selfhosted.yaml", {"EMBED_BASE": "http://10.0.0.9:8000"})
    assert known.data["engines"][-1]["url"] == "${EMBED_BASE}"
    assert _imported("selfhosted.yaml").data["engines"][-1]["url"] == "http://10.0.0.9:8000"  # without its /v1


def test_a_split_of_a_model_by_its_own_name(tmp_path: Path) -> None:
    file = tmp_path / "litellm.yaml"
    file.write_text(
        """
model_list:
  - {model_name: base, litellm_params: {model: openai/base, api_base: "http://10.0.0.1:8000"}}
  - {model_name: base, litellm_params: {model: openai/new, api_base: "http://10.0.0.2:8000"}}
"""
    )
    loaded = _loaded(config.from_litellm(file), tmp_path)
    assert loaded.models["base"].split == {"base-base": 1, "new": 1}
    assert [(engine.model, engine.served) for engine in loaded.engines] == [("base-base", "base"), ("new", None)]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WARMROUTE_STATE_DIR", str(tmp_path / "state"))


def test_the_command_writes_checks_and_applies(
    environment: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "warmroute.yaml"
    import_litellm(FILES / "selfhosted.yaml", output=file, apply=True)
    printed = capsys.readouterr().out.splitlines()
    assert any(line.startswith("ok: 5 engine(s)") for line in printed)
    assert printed[-1].startswith("price of llama-3.1-8b: price_")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    rows: list[dict[str, Any]] = run(file, lambda office: office.everything("/prices"))
    assert [row["per_million"] for row in rows] == [{"uncached_input": "0.2", "output": "0.6", "cache_read": "0.02"}]
    with pytest.raises(ConfigError, match="File exists"):
        import_litellm(FILES / "selfhosted.yaml", output=file)
    import_litellm(FILES / "selfhosted.yaml", output=tmp_path / "again.yaml", apply=True)
    assert capsys.readouterr().out.splitlines()[-1] == "price of llama-3.1-8b: as it is already"


def test_the_command_without_a_file_prints_ours_alone(capsys: pytest.CaptureFixture[str]) -> None:
    import_litellm(FILES / "mixed.yaml")
    printed = capsys.readouterr()
    assert yaml.safe_load(printed.out)["engines"][0]["url"] == "http://192.168.1.20:8080"
    assert "not taken" in printed.err


def test_a_file_of_providers_only(tmp_path: Path) -> None:
    file = tmp_path / "litellm.yaml"
    file.write_text("model_list: [{model_name: a, litellm_params: {model: gpt-4o}}]")
    with pytest.raises(ConfigError, match="nothing in it can be an engine"):
        import_litellm(file)
    file.write_text("model_list: [")
    with pytest.raises(ConfigError, match="is not YAML"):
        import_litellm(file)
