"""The prompts on which every topology must give the tokens of Hugging Face transformers, and the tool that asks it.

`python tests/e2e/golden_prompts.py MODEL_DIRECTORY > tests/data/smollm2-135m-matrix.json` writes the answers (fp32,
greedy, sdpa attention) with the most likely tokens at each position, so that a comparison can tell a near-tie from an
error.
"""

import json
import sys
from pathlib import Path
from typing import Any

EXACT_LENGTHS = (15, 16, 17, 63, 64, 65, 128, 129, 600, 1500)
NUM_OUTPUT_TOKENS = 12

_PLACES = ("harbour", "library", "station", "orchard", "workshop", "market", "observatory", "mill")
_PEOPLE = ("the clerk", "a painter", "two sailors", "the baker", "an engineer", "the twins", "a judge")
_DEEDS = (
    "counted the lamps",
    "repaired a clock",
    "wrote to the council",
    "sold apples",
    "measured the tide",
    "lost a key",
)

CHATS: dict[str, list[dict[str, str]]] = {
    "multi-turn": [
        {"role": "system", "content": "You answer briefly."},
        {"role": "user", "content": "Name a river in Germany."},
        {"role": "assistant", "content": "The Rhine."},
        {"role": "user", "content": "And which sea does it flow into?"},
    ],
    "unicode": [{"role": "user", "content": "Übersetze: «naïve café» — 東京 и Київ, 🙂👍🏽, ½ ≠ ⅓"}],
    "digits": [{"role": "user", "content": "What comes after 1234, 5678 and 90210? Is 3.14159 * 2 = 6.28318?"}],
    "code": [
        {
            "role": "user",
            "content": "Explain:\n```python\ndef f(x):\n    return [y ** 2 for y in range(x) if y % 2]\n```",
        }
    ],
}


def long_text(num_sentences: int = 200) -> str:
    """Varied, deterministic prose, longer than any prompt needs."""
    sentences = []
    for i in range(num_sentences):
        place, person, deed = _PLACES[i * 5 % 8], _PEOPLE[i * 3 % 7], _DEEDS[i * 7 % 6]
        sentences.append(
            f"On day {i + 1}, {person} went to the {place} and {deed} while {i * 37 % 101} people watched."
        )
    return " ".join(sentences)


def prompt_token_ids(tokenizer: Any, render: Any) -> dict[str, list[int]]:
    """Prompts by name. `tokenizer` has `encode(str) -> list[int]` without special tokens, `render` a chat template."""
    ids: list[int] = tokenizer(long_text())
    prompts = {f"length-{n}": ids[i : i + n] for i, n in enumerate(EXACT_LENGTHS)}
    prompts |= {name: tokenizer(render(messages)) for name, messages in CHATS.items()}
    return prompts


def main(directory: Path) -> None:
    """Ask transformers and print the golden file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    prompts = prompt_token_ids(
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        lambda messages: tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
    )
    items = []
    for name, ids in prompts.items():
        with torch.inference_mode():
            result = model.generate(
                torch.tensor([ids]), max_new_tokens=NUM_OUTPUT_TOKENS, do_sample=False, eos_token_id=None,
                pad_token_id=0, output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        logprobs = torch.cat([logits.log_softmax(-1) for logits in result.logits])
        top = logprobs.topk(5, dim=-1)
        items.append(
            {
                "name": name,
                "prompt_token_ids": ids,
                "output_token_ids": result.sequences[0, len(ids) :].tolist(),
                "top_ids": top.indices.tolist(),
                "top_logprobs": [[round(v, 6) for v in row] for row in top.values.tolist()],
            }
        )
    lines = ",\n".join(json.dumps(item) for item in items)
    head = f'"model": "SmolLM2-135M-Instruct", "dtype": "float32", "torch": "{torch.__version__}"'
    print(f'{{{head}, "items": [\n{lines}\n]}}')


if __name__ == "__main__":
    main(Path(sys.argv[1]))
