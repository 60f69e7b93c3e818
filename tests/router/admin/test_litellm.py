"""LiteLLM's routes, as its tools call them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.router.admin.office import Office, opened
from tests.router.admin.test_own import TODAY, used


@pytest.fixture
async def office(tmp_path: Path) -> AsyncIterator[Office]:
    async with opened(tmp_path) as office:
        yield office


async def _call(office: Office, method: str, path: str, **how: Any) -> Any:
    answer = await office.ask(method, path, **how)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_key_of_a_team_with_a_budget(office: Office) -> None:
    team = await _call(office, "POST", "/team/new", json={"team_alias": "acme", "max_budget": 100})
    wanted = {"key_alias": "prod", "team_id": team["team_id"], "models": ["m"], "duration": "30d", "rpm_limit": 60}
    wanted |= {"max_budget": 12.5, "budget_duration": "1mo"}
    office.at = 0.0
    made = await _call(office, "POST", "/key/generate", json=wanted)
    assert made["key"].startswith("sk-")
    assert (made["team_id"], made["models"], made["key_alias"]) == (team["team_id"], ["m"], "prod")
    assert made["expires"] == "1970-01-31T00:00:00+00:00"
    assert (await _call(office, "GET", f"/key/info?key={made['key']}"))["info"]["key_alias"] == "prod"
    limits = (await office.call("GET", f"/limits?owner={made['token']}")).json()["data"]
    assert {(row["measure"], row["window"], row["amount"]) for row in limits} == {
        ("requests", "1m", 60),
        ("money", "month", "12.5"),
    }
    owned = (await office.call("GET", f"/limits?owner={team['team_id']}")).json()["data"]
    assert [(row["window"], row["amount"]) for row in owned] == [("36500d", "100")]


async def test_keys_without_a_team_share_the_default_one(office: Office) -> None:
    first = await _call(office, "POST", "/key/generate", json={})
    second = await _call(office, "POST", "/key/generate", json={"key_alias": "b"})
    assert first["team_id"] == second["team_id"]
    assert [team["team_alias"] for team in await _call(office, "GET", "/team/list")] == ["default"]
    listed = await _call(office, "GET", f"/key/list?team_id={first['team_id']}")
    assert listed == {"keys": [second["token"], first["token"]], "total_count": 2} or listed["total_count"] == 2


async def test_a_key_is_regenerated_and_deleted(office: Office) -> None:
    old = await _call(office, "POST", "/key/generate", json={})
    new = await _call(office, "POST", "/key/regenerate", json={"key": old["key"]})
    assert new["key"] != old["key"]
    assert (await _call(office, "GET", f"/key/info?key={old['token']}"))["info"]["blocked"] is True
    assert await _call(office, "POST", "/key/delete", json={"keys": [new["key"]]}) == {"deleted_keys": [new["token"]]}
    info = await _call(office, "GET", f"/team/info?team_id={old['team_id']}")
    assert [key["blocked"] for key in info["keys"]] == [True, True]
    assert await _call(office, "POST", "/team/delete", json={"team_ids": [old["team_id"]]})
    assert await _call(office, "GET", "/team/list") == []


@pytest.mark.parametrize(
    "body", [{"soft_budget": 1}, {"duration": "soon"}, {"budget_duration": "30d"}, {"rpm_limit": -1}]
)
async def test_what_is_not_kept_is_refused_by_name(office: Office, body: dict[str, Any]) -> None:
    answer = await office.ask("POST", "/key/generate", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == next(iter(body))


async def test_models_with_what_everybody_pays_in_dollars(office: Office) -> None:
    await office.make(
        "/prices", model="m", per_million={"uncached_input": "0.3", "output": "1.2", "cache_read": "0.03"}
    )
    await office.make("/prices", model="*", per_million={"output": "9"}, currency="EUR")
    assert (await _call(office, "GET", "/model/info"))["data"] == [
        {
            **{"model_name": "m", "litellm_params": {"model": "m"}},
            "model_info": {
                **{"input_cost_per_token": 3e-7, "output_cost_per_token": 1.2e-6},
                "cache_read_input_token_cost": 3e-8,
            },
        },
        {"model_name": "later", "litellm_params": {"model": "later"}, "model_info": {}},
    ]


async def test_what_was_spent(office: Office) -> None:
    tenant, _, key = await office.tenant("acme")
    _, _, foreign = await office.tenant("umbrella")
    await used(office, key, "1.25")
    await used(office, key, "0.5", model="n")
    await used(office, foreign, "4")
    day = TODAY.isoformat()
    (report,) = await _call(office, "GET", "/global/spend/report")
    assert report["group_by_day"] == day
    assert {team["team_name"]: team["total_spend"] for team in report["teams"]} == {"acme": 1.75, "umbrella": 4.0}
    (report,) = await _call(office, "GET", "/global/spend/report?group_by=api_key")
    assert sorted(row["total_spend"] for row in report["api_keys"]) == [1.75, 4.0]
    (log,) = await _call(office, "GET", f"/spend/logs?api_key={key['id']}")
    assert log == {"startTime": day, "spend": 1.75, "models": {"m": 1.25, "n": 0.5}}
    assert await _call(office, "GET", "/spend/logs?start_date=2020-01-01&end_date=2020-01-02") == []
    assert await _call(office, "GET", "/spend/tags") == []
    own = await office.make("/keys", name="a", kind="admin", scopes=["reports:read"], tenant=tenant["id"])
    answer = await office.ask("GET", "/global/spend/report", key=own["key"])
    assert [[team["team_name"] for team in row["teams"]] for row in answer.json()] == [["acme"]]
    answer = await office.ask("GET", f"/global/spend/report?team_id={foreign['tenant']}", key=own["key"])
    assert answer.json() == []
