"""A name that stands for two models, through a whole gateway."""

from __future__ import annotations

from tests.flows.site import Site, chat, said, until


async def test_a_conversation_is_answered_by_one_arm_to_its_end(site: Site) -> None:
    base, candidate = await site.engine(model="base"), await site.engine(model="candidate")
    models = {"*": {"tokenizer": "demo"}, "chat": {"split": {"base": 50, "candidate": 50}, "aliases": ["talk"]}}
    client = await site.gateway(base, candidate, models=models)

    async def listed() -> bool:
        answer = await client.http.get(f"{client.running.url}/v1/models")
        return {"base", "candidate", "chat", "talk"} == {card["id"] for card in answer.json()["data"]}

    await until(listed, what="the split and its arms are listed")
    arms: set[str] = set()
    for number in range(12):
        messages = [said(f"subject {number}")]
        chosen = set()
        for _ in range(3):
            answer = await client.ask({**chat(*messages), "model": "talk"})
            messages += [said(answer.said, role="assistant"), said("go on")]
            receipt = await client.receipt(answer.id)
            assert receipt["asked_model"] == "chat"
            assert receipt["model"] == answer.json["model"]
            chosen.add(receipt["model"])
        assert len(chosen) == 1
        arms |= chosen
    assert arms == {"base", "candidate"}
    direct = await client.ask({**chat("x"), "model": "base"})
    assert (await client.receipt(direct.id))["asked_model"] == ""
