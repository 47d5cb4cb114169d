"""Print the small model's answers as Markdown: greedy, then at a temperature of 0.7.

python models/sample_tiny.py --model models/millrace-tiny > samples.md

Uses `transformers` (a development dependency), so that nothing of Millrace's own engine takes part.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny_reading import text_with_facts
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = (
    "Tell me a story about a heron.",
    "Write a short story about a robot called Iris.",
    "Hello! Who are you?",
    "What can you do?",
    "What is prefill?",
    "Explain continuous batching.",
    "Count from 3 to 9.",
    "What is 4 plus 5?",
    "Spell river.",
    "What is the opposite of hot?",
    "Name five animals.",
    "Write a poem about the moon.",
    "What do you think about quantum physics?",
    "Repeat after me: The brave otter and the silver bell are near the lake.",
)


def document_prompt(count: Callable[[str], int], tokens: int, seed: int) -> tuple[str, str]:
    """A text of about `tokens` tokens with a question at the end, and the right answer."""
    sentences = 16
    while True:
        rng = random.Random(seed)
        text, turns = text_with_facts(
            rng, facts=sentences // 5, fillers=sentences - sentences // 5, paragraph=8
        )
        if count(text) >= tokens:
            question, answer = turns[len(turns) // 2]
            return (
                f"Read the text and answer the question.\n\n{text}\n\nQuestion: {question}",
                answer,
            )
        sentences += 1 + sentences // 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("models/millrace-tiny"))
    parser.add_argument("--documents", type=int, nargs="*", default=[300, 1000, 2000, 4000, 8000])
    parser.add_argument("--max-tokens", type=int, default=320)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer: Any = AutoTokenizer.from_pretrained(args.model)
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)

    def count(text: str) -> int:
        return len(tokenizer(text).input_ids)

    def answer(prompt: str, temperature: float) -> str:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        torch.manual_seed(7)
        sampling = {"do_sample": temperature > 0, "max_new_tokens": args.max_tokens}
        sampling |= {"temperature": temperature, "top_p": 0.95} if temperature > 0 else {}
        out = model.generate(**ids, **sampling)[0, ids["input_ids"].shape[1] :]
        return str(tokenizer.decode(out, skip_special_tokens=True))

    for prompt in PROMPTS:
        print(f"**{prompt}**\n")
        for temperature in (0.0, 0.7):
            print(f"- at {temperature}: {answer(prompt, temperature)!r}")
        print(flush=True)
    for tokens in args.documents:
        for seed in (1, 2, 3):
            prompt, right = document_prompt(count, tokens, seed)
            print(f"- {tokens} tokens: wants {right!r}, says {answer(prompt, 0.0)!r}", flush=True)


if __name__ == "__main__":
    main()
