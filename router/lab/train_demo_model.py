"""Trains the demo tokenizer: a small byte-level BPE on text that this file generates itself.

    python -m router.lab.train_demo_model        rewrites router/lab/demo_model/tokenizer.json, about 5 s

The result is what demos, simulated engines and tests use in place of a real model's tokenizer. It has the shape of
the large ones (byte-level BPE, a GPT-4-like pre-tokenizer, special tokens around turns), so that everything proven
on it - cutting, memo, parity - is proven on the same mechanism. Same input, same file: the dice are seeded.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

OUT = Path(__file__).parent / "demo_model"
VOCABULARY = 4_600  # keeps tokenizer.json under 300 KB
SPECIAL = ("<|endoftext|>", "<|turn|>", "<|end|>", "<|tools|>", "<|call|>", "<|result|>")
PRE_TOKENIZER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _listed(text: str) -> list[str]:
    """What stands between bars and line ends."""
    return text.strip().replace("\n", "|").split("|")


SUBJECTS = _listed("""
the engineer|the customer|our team|a small model|the operator|every request|the cache|this gateway
the user|the assistant|another tenant|the scheduler|a long prompt|the first token|the weather|the city
the river|a teacher|the student|my friend|the company|the report|an old house|the garden|the train
the ship|the doctor|the author|a quick brown fox|the lazy dog|the kitchen|the library|the market
the mountain|the children|the music|the question|the answer|the meeting|the new policy
""")
VERBS = _listed("""
waits for|answers|reads|writes|measures|changes|remembers|forgets|moves|opens|closes|explains|describes
follows|needs|uses|wants|finds|loses|builds|breaks|repairs|sends|receives|stores|removes|counts|compares
chooses|places|starts|stops|helps|asks about|looks at|talks about|depends on|belongs to|works with
arrives before
""")
OBJECTS = _listed("""
a block of memory|the same prefix|the next turn|two hundred tokens|a short summary|the original document
an empty queue|the final result|a second copy|the price of bread|a cup of tea|some good advice
the whole story|a list of numbers|the database|a table with four columns|an important message
the morning light|a simple example|three different answers|the right engine|the system prompt
a photograph of the harbour|their own money|a better explanation|the latest version|a letter from home
""")
JOINTS = _listed("""
because|although|while|and then|so that|unless|after|before|if|since|whenever|but
""")
OPENINGS = _listed("""
You are a helpful assistant.|Please answer in one sentence.|What is the difference between them?
Summarise the text.|Translate the following paragraph.|Think step by step.
I don't know, but let's find out.|It's not what we'd expect.|Thank you very much!
Could you explain why this happens?|Here is an example:|The following table shows the results.
For more information, see below.
""")

CHINESE_WORDS = _listed("""
我们|你们|他们|这个|那个|什么|怎么|为什么|因为|所以|但是|如果|可以|需要|使用|模型|推理|缓存|命中|前缀
请求|响应|网关|引擎|调度|策略|成本|延迟|吞吐|显存|计算|数据|系统|用户|助手|问题|回答|文档|代码|函数|参数
结果|时间|今天|明天|天气|城市|北京|上海|学校|老师|学生|朋友|公司|工作|学习|生活|世界|国家|语言|中文|英文
翻译|总结|解释|例子|方法|重要|简单|复杂|新的|旧的|第一|第二|开始|结束|增加|减少|提高|降低|选择|比较|发送
接收|保存|删除|打开|关闭|一个|两个|三个|很多|所有|每次|已经|还没有|正在|可能|应该
""")
CHINESE_SENTENCES = (
    "请用一句话回答下面的问题。",
    "你是一个乐于助人的助手。",
    "同样的前缀只需要计算一次，后面的请求可以直接命中缓存。",
    "网关把请求送到保存着相同前缀的引擎上，首个词元的延迟就会降低。",
    "今天的天气很好，我们一起去公园散步吧。",
    "如果显存不够，最久没有使用的块会先被淘汰。",
    "请把下面这段文字翻译成英文，并说明理由。",
)
OTHER_SCRIPTS = (
    "Grüße aus Köln, schöne Straße über den Fluß.",
    "Où est la bibliothèque ? C'est très près d'ici.",
    "¿Cuánto cuesta el billete a la ciudad?",
    "Привет, как дела? Это хороший вопрос.",
    "こんにちは、今日はいい天気ですね。ありがとうございます。",
    "안녕하세요, 오늘 날씨가 좋습니다.",
    "مرحبا، كيف حالك اليوم؟",
    "नमस्ते, आप कैसे हैं?",
    "🙂 👍🏽 👨‍👩‍👧 🚀 ✅ 🇫🇮",
)
NAMES = _listed("""
key|value|name|type|model|tokens|prompt|cache|block|size|count|index|items|result|error|state|user|config|path|data
""")
TYPES = ("int", "str", "float", "bool", "list[int]", "dict[str, int]", "bytes | None")
PYTHON = (
    "def {a}_{b}(self, {c}: {t}, {b}: {u}) -> {t}:\n    return self._{a}[{c}] + {b}\n\n",
    "for {a} in range(len({b})):\n    if {a} >= {c} and not {b}[{a}]:\n        continue\n    {c} += 1\n",
    "class {A}{B}:\n    def __init__(self, {a}: {t}) -> None:\n        self.{a} = {a}\n"
    "        self.{b}: dict[str, {u}] = {{}}\n\n",
    'raise ValueError(f"{a} {{{b}}} is not a {c}")\n',
    "import {a}\nfrom {b}.{c} import {A}\n\n",
    "async def {a}(): await {b}.{c}(timeout=30.0)\n",
    "const {a} = await fetch(`/v1/{b}/${{{c}}}`); // {a}\nfunction {b}({c}) {{ return {c} === null ? [] : {a}; }}\n",
    "SELECT {a}, COUNT(*) FROM {b} WHERE {c} > 100 GROUP BY {a} ORDER BY 2 DESC;\n",
)


def english(dice: random.Random) -> str:
    clause = f"{dice.choice(SUBJECTS)} {dice.choice(VERBS)} {dice.choice(OBJECTS)}"
    if dice.random() < 0.4:
        clause += f" {dice.choice(JOINTS)} {dice.choice(SUBJECTS)} {dice.choice(VERBS)} {dice.choice(OBJECTS)}"
    sentence = clause[0].upper() + clause[1:] + dice.choice([".", ".", "!", "?", ", he said.", ":\n"])
    return dice.choice(OPENINGS) + " " + sentence if dice.random() < 0.15 else sentence


def chinese(dice: random.Random) -> str:
    if dice.random() < 0.2:
        return dice.choice(CHINESE_SENTENCES)
    return "".join(dice.choices(CHINESE_WORDS, k=dice.randint(3, 9))) + dice.choice("。，！？；")


def code(dice: random.Random) -> str:
    a, b, c = dice.sample(NAMES, 3)
    t, u = dice.sample(TYPES, 2)
    return dice.choice(PYTHON).format(a=a, b=b, c=c, t=t, u=u, A=a.capitalize(), B=b.capitalize())


def json_text(dice: random.Random) -> str:
    properties = {name: {"type": dice.choice(["string", "integer", "object"])} for name in dice.sample(NAMES, 3)}
    function = {"name": f"get_{dice.choice(NAMES)}", "description": english(dice), "parameters": {"type": "object"}}
    function["parameters"] = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return json.dumps({"type": "function", "function": function}, indent=dice.choice([None, 2])) + "\n"


def markdown(dice: random.Random) -> str:
    head = f"{'#' * dice.randint(1, 4)} {dice.choice(OBJECTS).title()}\n\n"
    return head + "".join(f"{dice.choice(['- ', '* ', '1. '])}{english(dice)}\n" for _ in range(3)) + "\n"


def numbers(dice: random.Random) -> str:
    date = f"2{dice.randint(0, 999):03d}-0{dice.randint(1, 9)}-1{dice.randint(0, 9)}T10:00:00Z"
    return f"{dice.randint(0, 99999)} {dice.random():.4f} {date}\n"


def corpus(sentences: int = 60_000, seed: int = 7) -> Iterator[str]:
    dice = random.Random(seed)
    kinds = (english, english, english, chinese, chinese, code, json_text, markdown, numbers)
    for n in range(sentences):
        yield dice.choice(kinds)(dice)
        if n % 40 == 0:
            yield dice.choice(OTHER_SCRIPTS)


def train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENIZER), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=2,
        show_progress=False,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


if __name__ == "__main__":
    train().save(str(OUT / "tokenizer.json"), pretty=False)
