"""Damaged folders of language models: equal logits, or an error that names the folder or what is wrong in it."""

import json
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from mechicl import report
from mechicl.interop import load_language_model
from tests.analysis.language.conftest import make_tokenizer
from tests.faults.runner import Campaign, Outcome

IDS = torch.tensor([[1, 7, 9, 12, 8]])
SIZES: dict[str, tuple[str, ...]] = {
    "llama": ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
              "vocab_size"),
    "gpt2": ("n_layer", "n_embd", "n_head", "vocab_size", "n_positions"),
}  # fmt: skip
"""Fields of configs whose value the weights' shapes decide, except that of the number of heads in some."""


ARCHITECTURES = ("BertForMaskedLM", "NoSuchForCausalLM", "", None, 3, "T5ForConditionalGeneration")


class Folders(Campaign):
    """One file of a folder of `transformers` is changed, and the folder is opened."""

    name = "folders"
    bar = "damaged folders of language models: equal logits, or a named error"
    n, sample, seconds = 150, 20, 60.0

    def prepare(self) -> None:
        tokenizer = make_tokenizer()
        n = len(tokenizer)
        made = {
            "llama": LlamaForCausalLM(LlamaConfig(
                vocab_size=n, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=1, initializer_range=0.3, tie_word_embeddings=self.seed % 2 == 1,
            )),
            "gpt2": GPT2LMHeadModel(GPT2Config(
                n_layer=2, n_head=2, n_embd=16, n_positions=32, vocab_size=n, initializer_range=0.3, bos_token_id=0,
                eos_token_id=0,
            )),
        }  # fmt: skip
        self.logits = {}
        for name, model in made.items():
            model.eval().save_pretrained(self.folder / name)
            tokenizer.save_pretrained(self.folder / name)
            with torch.no_grad():
                self.logits[name] = model(IDS).logits
        warnings.simplefilter("ignore")

    def run(self, number: int, rng: random.Random, folder: Path) -> Outcome:
        kind = rng.choice(sorted(self.logits))
        opened = folder / kind
        shutil.copytree(self.folder / kind, opened)
        way = self._files if number % 2 else self._config
        text = f"{kind}: {way(opened, kind, rng)}"
        try:
            language = load_language_model(opened)
            with torch.no_grad():
                logits = language.model(IDS)
            if number % 10 == 9:
                report(opened, "antonyms", folder / "page", progress=False)
        except Exception as error:
            named = isinstance(error, ValueError | OSError | ImportError) and len(str(error)) < 2000
            field = text.partition("config: ")[2].partition("=")[0] or opened.name
            words = (str(opened), field, "tensor", "weight", "config", "tokenizer", "architecture", "layers")
            named = named and any(word in str(error) for word in words)
            kind_of = "a named error" if named else "a raw error"
            return Outcome(kind_of, named, f"{text} -> {type(error).__name__}: {str(error)[:300]}")
        if logits.shape == self.logits[kind].shape and torch.allclose(logits, self.logits[kind], atol=1e-4):
            return Outcome("equal logits", True, text)
        off = (logits - self.logits[kind]).abs().max() if logits.shape == self.logits[kind].shape else logits.shape
        return Outcome("WRONG: other logits", False, f"{text} -> off by {off}")

    def _config(self, folder: Path, kind: str, rng: random.Random) -> str:
        config = json.loads((folder / "config.json").read_text())
        if rng.random() < 0.3:
            return self._write(folder, config, "architectures", [rng.choice(ARCHITECTURES)])
        name = rng.choice([*SIZES[kind], "model_type", "torch_dtype", "architectures"])
        return self._write(folder, config, name, rng.choice([None, "word", -1, 0, [], 10**9, 1e300, {}]))

    def _write(self, folder: Path, config: dict[str, Any], name: str, value: Any) -> str:
        (folder / "config.json").write_text(json.dumps({**config, name: value}))
        return f"config: {name}={value!r}"

    def _files(self, folder: Path, kind: str, rng: random.Random) -> str:
        path = rng.choice(sorted(each for each in folder.iterdir() if each.name != "generation_config.json"))
        data = path.read_bytes()
        way = rng.choice(("removed", "cut", "emptied", "a list"))
        if way == "removed":
            path.unlink()
        else:
            path.write_bytes({"cut": data[: rng.randrange(len(data))], "emptied": b"", "a list": b"[1, 2]"}[way])
        return f"{path.name} {way}"
