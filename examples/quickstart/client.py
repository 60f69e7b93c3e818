"""A conversation through the gateway: each turn repeats all turns before it, so the engine that has them is best."""

from openai import OpenAI

QUESTIONS = ["What is a KV cache?", "And a prefix?", "Why should the second turn go where the first one went?"]

client = OpenAI(base_url="http://127.0.0.1:4000/v1", api_key="none-yet")  # the one line that changes
messages = [{"role": "system", "content": "You explain how language models are served. " * 40}]
for question in QUESTIONS:
    messages.append({"role": "user", "content": question})
    answer = client.chat.completions.create(model="demo", messages=messages, max_tokens=64)
    messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    usage = answer.usage
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    print(f"{usage.prompt_tokens:5} prompt tokens, {cached or 0:5} of them cached: {question}")
